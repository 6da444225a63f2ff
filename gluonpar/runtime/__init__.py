"""MXNet's engine, array memory, threads and devices.

No other package uses MXNet 1.9.1's private interfaces. ``private_fields`` has the fields of Gluon's
and the optimizers' objects; ``memory``, ``engine`` and ``threads`` have those of its C++ library.
"""
