"""Comparisons: a plan of cells, played by worker processes, summarised by fedsign.comparison."""
