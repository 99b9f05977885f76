"""Deletes a capability from a scratch clone, and checks what is left."""
