"""Recipes: a claim, a figure or a table as one named function with a computed verdict."""
