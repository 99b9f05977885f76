"""Image data sets in a folder: MNIST, SVHN, CIFAR, CINIC-10, and your own."""
