"""Sums and training steps of several processes beside other libraries', and a model of the cost."""
