"""MXNet's engine, array memory and tape, threads and devices.

No other package uses MXNet 1.9.1's private interfaces. ``private_fields`` has the private fields of
Gluon's and the optimizers' objects; the other modules call MXNet's C++ library.
"""
