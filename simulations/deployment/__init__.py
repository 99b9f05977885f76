"""`fedsign deploy`: run a federation on several machines, from certificates to processes."""
