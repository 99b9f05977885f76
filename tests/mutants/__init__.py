"""Mutation tests: `python -m tests.mutants` plants one fault at a time and reports which test detects it.

Hand-seeded faults (`faults.toml`) and a seeded sample of operator mutants of the core are planted in scratch copies of
the tree.  mutmut and Cosmic Ray mutate everything in one package; here the faults are data, and the sample is bounded.
"""
