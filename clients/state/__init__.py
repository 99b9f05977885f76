"""Client state between rounds."""
