"""Models and losses, as plain functions of arrays and as Gluon networks."""
