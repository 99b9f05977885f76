"""Partitions: which client holds which training sample.

A partitioner takes (training samples, number of clients, generator) and its settings.  It returns one array of sample
indices per client: disjoint, and together covering all samples.  The built-in ones return a `Split`
(`fedsign.data.partition.base`), which also reports moved samples; a user's own may return a plain list.  `virtual` is
the exception: its shares are drawn on access (`LazyShares`) and overlap.
"""
