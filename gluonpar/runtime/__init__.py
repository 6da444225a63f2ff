"""MXNet's engine, array memory, threads, CUDA libraries, driver and devices.

The only package that uses private interfaces of MXNet 1.9.1. Nothing is imported here: modules such
as :mod:`~gluonpar.runtime.driver` and :mod:`~gluonpar.runtime.wheels` must work without MXNet.
"""
