"""Bilevel optimization: gradients through training, with respect to data and hyperparameters."""
