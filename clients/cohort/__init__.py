"""The cohort path: the clients of a round, trained as one stack of tensors."""
