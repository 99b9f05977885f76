"""The version, for `fedsign`, the build and records."""

__version__ = "0.1.0"
