"""Benchmarks of FedSign and its competitors on the same workloads; see `python -m benchmarks --help` and README.md."""
