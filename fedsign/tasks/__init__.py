"""Tasks: the loss that compares a model's outputs with the targets."""
