"""Figures and pages, created from results on disk alone."""
