"""Workloads of FedSign alone, without competitors."""
