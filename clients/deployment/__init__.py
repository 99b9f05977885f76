"""The clients' side of a deployment: SuperNodes, what they decide for themselves, evaluation at sites."""
