"""Partitions: which client holds which training sample.

A partitioner takes (training samples, number of clients, generator) and its settings, and returns one
array of sample indices per client: disjoint, and together all samples.
"""
