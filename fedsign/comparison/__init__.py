"""Compare strategies over seeds and a grid: statistics, page, tables and figures for a paper, from runs on disk.

Needs neither torch nor Flower.
"""
