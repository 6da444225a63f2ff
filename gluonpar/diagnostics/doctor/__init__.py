"""gluonpar doctor: what is installed and what is wrong; works without MXNet and NumPy."""
