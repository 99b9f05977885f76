"""Signs of models compared: `fedsign analyse signs`."""
