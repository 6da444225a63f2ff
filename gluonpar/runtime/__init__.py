"""MXNet's engine, array memory, threads and devices.

No other package uses the private fields of MXNet 1.9.1's objects; ``private_fields`` has them all.
"""
