"""Tokens and sentence pairs: corpora by name, tokenizers, caches, and mini-batches."""
