"""Simulated attackers and faults."""
