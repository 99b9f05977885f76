"""Learning through training: gradients of what training leads to, with respect to what it was given."""
