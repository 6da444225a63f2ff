"""What the ranks of a job run, in tests of several processes."""
