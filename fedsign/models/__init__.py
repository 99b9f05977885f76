"""Models.  A factory takes (input shape without the batch, number of outputs) and its settings."""
