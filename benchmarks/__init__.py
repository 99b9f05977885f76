"""Benchmarks: ours and the peers in turn, on the same works.  `python -m benchmarks --help`, and README.md here."""
