"""Benchmarks of FedSign and its competitors on the same workloads: `python -m benchmarks --help`, and README.md here."""
