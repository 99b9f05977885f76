"""Delete a capability from a scratch clone, and check the rest."""
