"""`fedsign estimate`: what an experiment will take, before it is run."""
