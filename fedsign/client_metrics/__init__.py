"""Metrics of each client in each round."""

FILE = "clients.jsonl"
