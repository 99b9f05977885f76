"""Language models: `fedsign export`."""
