"""Local objectives, one file each: the terms that a client adds to the task loss."""
