"""Differential privacy: what is clipped, which noise hides it, and how much of the budget is spent.

Two clients' data sets are *neighbors* when one client's data is replaced by any other data; the number of clients is
public.  `central` and `central_adaptive` trust the server: it sees the clients' updates, and what it makes of them, the
models of all rounds, is private.  With `local` nobody is trusted: what leaves a client is private already.  Everything
computed from what is private stays so: a strategy's move, its memory, a server optimizer, the report of test figures.
"""
