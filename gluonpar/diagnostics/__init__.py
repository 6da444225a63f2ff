"""Tests of the user's devices and networks (verify), of the installation (doctor); benchmarks.

Nothing is imported here: the doctor must work without MXNet.
"""
