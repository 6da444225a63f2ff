"""scripts/bench_cluster.py: sums and steps of several processes, beside others', and their cost."""
