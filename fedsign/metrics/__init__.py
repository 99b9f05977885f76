"""Metrics: functions of (outputs [n, ...], targets [n]) that return one number."""
