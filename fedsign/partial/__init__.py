"""Replies that hold a part of the model, and requests that leave out what a client has."""
