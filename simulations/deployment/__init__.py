"""`fedsign deploy`: a federation over several machines, from the certificates to the processes."""
