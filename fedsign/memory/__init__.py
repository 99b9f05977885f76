"""Training memory: counted during a run, or estimated from a configuration."""
