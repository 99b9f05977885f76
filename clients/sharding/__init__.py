"""One client's training, sharded over several processes."""
