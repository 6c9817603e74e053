"""Tokens and pairs of sentences: corpora by name, tokenizers, caches and mini-batches."""
