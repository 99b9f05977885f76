"""Recipes on federated algorithms: FedSign, FedDyn, NIID-Bench, and robust aggregation under attack."""
