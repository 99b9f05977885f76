"""A client of several processes: `fedsign estimate sharding`, `fedsign worker`."""
