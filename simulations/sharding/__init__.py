"""Sharded clients: `fedsign estimate sharding` and `fedsign worker`."""
