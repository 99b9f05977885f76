"""A run on disk, in files that stay consistent after a crash at any moment."""
