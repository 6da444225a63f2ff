"""Benchmarks of copies, all-reduces and training steps, and their harness."""
