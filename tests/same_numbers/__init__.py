"""Do two commits give the same numbers?  `make same-numbers BASE=<commit>` runs `configurations/` on both."""
