"""MXNet's engine, array memory, threads and devices.

No other package uses what is private to MXNet 1.9.1. ``private_fields`` has the fields of Gluon's
and the optimizers' objects; ``memory``, ``engine`` and ``threads`` have those of its C++ library.
"""
