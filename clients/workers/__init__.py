"""Worker processes that train the clients of a round in parallel."""
