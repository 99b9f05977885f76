"""Text as samples: readers, tokenizers, and blocks of tokens of one length."""
