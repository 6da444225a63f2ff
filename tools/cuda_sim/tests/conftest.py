"""MXNet 1.9.1 is imported after gluonpar, which gives NumPy the names that it uses."""

import gluonpar  # noqa: F401
