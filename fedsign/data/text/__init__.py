"""Text as samples: tokenizers, and blocks of tokens of one length."""
