"""Models and losses: plain functions of arrays, and Gluon networks."""
