"""Tokens and sentence pairs: corpora by name, tokenizers, caches, and mini-batches.

tokenizer.py         text to ids and back
token_cache.py       ids on disk
text_folder.py       plain text, for language models; tokens.py has its mini-batches

corpora.py           the corpora of sentence pairs, one row per name
parallel_corpus.py   pairs by language, as ids; sentences.py keeps many in one array
parallel_text.py, binarized.py, multilingual_text.py, message_catalogue.py    where pairs come from
sentence_walk.py     which pairs an epoch shows
translation_loader.py    their mini-batches
"""
