"""The version; setup.py reads this file."""

__version__ = "0.2.0"
