"""MXNet's engine, array memory, threads and devices."""
