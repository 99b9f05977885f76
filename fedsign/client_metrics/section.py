"""Keys for per-client metrics in the configuration table [results]."""

from fedsign.sections import Table


class ClientMetricsKeys(Table):
    """Keys in [results]."""

    no_result = frozenset({"clients"})

    clients: bool = True  # write the metrics of each round's clients to clients.jsonl; never with [privacy]
