"""Comparisons: a plan of cells, played by worker processes, summarized by fedsign.comparison."""
