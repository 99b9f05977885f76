"""Comparisons: a plan of cells, run by worker processes, summarized by fedsign.comparison."""
