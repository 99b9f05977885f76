"""One client's training, divided over several processes."""
