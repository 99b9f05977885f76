"""Pictures and pages, made from results on disk only."""
