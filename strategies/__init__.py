"""Federated algorithms, one file each, on the server's side."""
