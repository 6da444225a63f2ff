"""The data sets: where their files are found, how they are read, and minibatches of them."""
