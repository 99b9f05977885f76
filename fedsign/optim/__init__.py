"""Local optimizers: functions of (parameters, lr, weight_decay) and their settings."""
