"""Recipes: each checks a claim, a figure or a table of a paper, and computes a verdict."""
