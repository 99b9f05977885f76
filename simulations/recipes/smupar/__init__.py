"""Recipes on SμPar: sparse models trained with the hyperparameters of a small dense one."""
