"""Metrics of each client in each round."""

CLIENTS_FILE = "clients.jsonl"
