"""What compares gluonpar with its peers; not in the wheel."""
