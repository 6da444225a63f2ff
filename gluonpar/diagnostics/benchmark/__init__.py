"""The harness of all benchmarks, and the benchmark of the all-reduce."""
