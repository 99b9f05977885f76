"""`fedsign ablate`."""
