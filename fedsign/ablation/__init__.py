"""Which part of a regularizer its gain comes from: matched controls, and a page that sets them side by side."""
