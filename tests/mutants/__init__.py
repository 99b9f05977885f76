"""Mutation tests of the test suite: `python -m tests.mutants` plants faults one at a time and says which test sees each.

Hand-seeded faults (`faults.toml`) and a seeded sample of operator mutants of the core are planted in scratch copies of the tree.
mutmut and Cosmic Ray mutate everything that they find in one package; here the faults are data, and the sample is bounded.
"""
