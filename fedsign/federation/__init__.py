"""Exchange between server and clients: encoding, validation, accounting and aggregation."""
