"""The package version, in a module of its own so that the build can read it without importing."""

__version__ = "0.1.0"
