"""MXNet's engine, array memory, threads, CUDA's libraries and driver, devices.

The only room that touches private interfaces of MXNet 1.9.1. Nothing is imported here: the modules
that need no MXNet (:mod:`~gluonpar.runtime.wheels`, :mod:`~gluonpar.runtime.driver`,
:mod:`~gluonpar.runtime.cuda_libraries`) must work where there is none.
"""
