"""Valleys of convolutional networks on CIFAR-10 (JPEG): experiments, results and their page."""
