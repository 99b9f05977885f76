"""Selection: the best model by validation, kept besides the last, and early stopping."""
