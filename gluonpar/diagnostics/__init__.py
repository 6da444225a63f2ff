"""The commands selftest, doctor and bench, and ``gluonpar.verify``.

Nothing is imported here: doctor must work without MXNet.
"""
