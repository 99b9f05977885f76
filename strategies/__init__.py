"""Server side of the federated algorithms, one file each."""
