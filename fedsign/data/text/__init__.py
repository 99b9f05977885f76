"""Text data: readers, tokenizers, and blocks of tokens of a fixed length."""
