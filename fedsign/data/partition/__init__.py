"""Partitions: which client holds which training sample.

A partitioner takes (training samples, number of clients, generator) and its settings, and returns one
array of sample indices per client: disjoint, and together all samples.  The rows of this table return
them in a `Split` (see `fedsign.data.partition.base`), which also says what had to be moved; a user's
own may return the plain list.  `virtual` is the row whose shares are made on use (`LazyShares`) and overlap.
"""
