"""The package version, the single source for the build, the command line and run records."""

__version__ = "0.2.0"
