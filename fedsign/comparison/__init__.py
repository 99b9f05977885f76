"""Strategies side by side over seeds and a grid: what is read off their runs, the page, tables and figures for a paper.

From results only, without torch and Flower.
"""
