"""Rules that change the masks of a sparse model during training, one per file."""
