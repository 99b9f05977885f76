"""Federated algorithms side by side: FedSign, FedDyn, NIID-Bench's, and robust ones under attack."""
