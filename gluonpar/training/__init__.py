"""A whole run of training: data, epochs, console, checkpoints, profile, command line."""
