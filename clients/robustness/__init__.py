"""Attackers and faults, simulated."""
