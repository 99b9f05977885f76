"""The clients of a round, trained by several processes."""
