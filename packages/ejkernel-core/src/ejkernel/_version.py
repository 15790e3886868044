"""The version, in one place for the build and for the running package."""

__version__ = "0.2.0"
