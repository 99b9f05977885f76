"""Server optimizers, one file each.  They step on the pseudo-gradient served - proposal."""
