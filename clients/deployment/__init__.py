"""The client side of a deployment: SuperNodes, their own settings, and evaluation at sites."""
