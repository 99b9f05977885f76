"""Tasks: what a model's output is compared with, and how."""
