"""What training takes in memory: counted while it runs, and estimated from a configuration."""
