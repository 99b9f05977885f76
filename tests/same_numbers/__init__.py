"""Do two commits give the same numbers?  `make same-numbers BASE=<commit>` plays `configurations/` on both."""
