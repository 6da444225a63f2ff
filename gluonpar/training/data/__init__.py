"""The data sets: where their files are found, and what is in them."""
