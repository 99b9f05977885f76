"""Local optimizers: factories that take (parameters, lr, weight_decay) and their settings."""
