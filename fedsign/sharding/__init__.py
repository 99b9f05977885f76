"""PaRO: the states of one model sharded over the machines of one client, fourteen ways.

Paper: Wu et al. 2023, "Rethinking Memory and Communication Costs for Efficient Data Parallel Training of Large
Language Models" (arXiv 2310.06003).  Nothing here knows of federation: a script under torchrun can use it alone.
"""
