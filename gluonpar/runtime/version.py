"""The version, in one place: setup.py reads this file."""

__version__ = "0.1.0"
"""The version as text: major, minor, patch."""
