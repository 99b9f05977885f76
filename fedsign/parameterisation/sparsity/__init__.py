"""Rules by which a sparse model's masks change while it trains: a table, one rule a file."""
