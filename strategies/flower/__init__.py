"""Flower's own strategies as rows of the table: its classes unmodified, with the settings that count here.

Left out are Flower's settings of sampling (the round loop samples `server.cohort_size` clients), of federated
evaluation (the server evaluates centrally), of record keys, and `eta_l`, which Flower only prints.  All classes
take their replies' weights from a metric; `weighting` says which.
"""
