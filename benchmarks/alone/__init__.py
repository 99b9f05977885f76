"""Works that FedSign plays without a peer."""
