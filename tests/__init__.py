"""The tests of gluonpar: one folder per folder of the package, and what they share."""
