"""benchmarks/cluster: sums and steps of several processes, beside others', and their cost."""
