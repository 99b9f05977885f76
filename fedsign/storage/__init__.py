"""A run on disk: files that are whole after a crash at any moment."""
