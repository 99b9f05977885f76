"""`fedsign tune`: settings found by trying them."""
