"""Analyses of trained models: loss valleys, signs, interpolation, curvature.  Plain PyTorch, independent of federation.

Paper: Li, Zhan et al. 2024, "Visualizing, Rethinking, and Mining the Loss Landscape of Deep Neural Networks"
(arXiv 2405.12489).  theta_f -> `center`, eps -> a direction, lambda -> a coefficient, s -> the scale.
"""
