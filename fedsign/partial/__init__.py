"""Partial updates: replies with a part of the model, and requests without what the client already has."""
