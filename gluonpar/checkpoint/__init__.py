"""Parameters, optimizer states and training state in files, each written whole or not at all."""
