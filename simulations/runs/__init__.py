"""Runs on disk: the list of them, tags, removal."""
