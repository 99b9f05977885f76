"""Loss valleys, linear interpolation and curvature of a run, a checkpoint or a file of weights."""
