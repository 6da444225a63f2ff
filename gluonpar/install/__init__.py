"""Before MXNet can be imported: wheels, CUDA's libraries, driver, NumPy's names.

The lowest of the packages. Its modules work where MXNet is missing or broken; only
:func:`gluonpar.install.startup.start` imports it.
"""

from gluonpar.install.version import __version__

__all__ = ["__version__"]
