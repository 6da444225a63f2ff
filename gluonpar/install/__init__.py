"""Before MXNet can be imported: wheels, CUDA's libraries, driver, NumPy's names.

The lowest of the packages. Its modules work where MXNet is missing or broken; only
:func:`gluonpar.install.startup.start` imports it.
"""

__version__ = "0.3.0"  # pyproject.toml reads it, too
