"""Client-level differential privacy: clipping, noise, and the privacy budget.

Two populations are *neighbors* if one client's data is replaced by any other data; the number of clients is public.
`central` and `central_adaptive` trust the server, which sees the clients' updates; the models of all rounds are
private.  `local` trusts nobody: what leaves a client is already private.  Post-processing preserves privacy: the server
update, its state, a server optimizer, and the report of test metrics are as private as the models.
"""
