"""python -m gluonpar doctor: what is installed and what is wrong; needs neither MXNet nor NumPy."""
