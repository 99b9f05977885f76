"""Server optimizers, one file each: steps on the pseudo-gradient served - target."""
