"""One experiment's settings searched, and learnt beside."""
