"""PaRO: fourteen strategies to shard one client's model states over several machines.

Paper: Wu et al. 2023, "Rethinking Memory and Communication Costs for Efficient Data Parallel Training of Large Language
Models" (arXiv 2310.06003).  This package is independent of federation; a script under torchrun can use it alone.
"""
