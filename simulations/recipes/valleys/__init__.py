"""Recipes on the FedSign paper's figures: signs and asymmetric valleys of the loss."""
