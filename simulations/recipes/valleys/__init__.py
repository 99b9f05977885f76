"""The figures of the FedSign paper: signs and asymmetric valleys of the loss."""
