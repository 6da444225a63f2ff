"""What python -m gluonpar verify --report FILE.json measures, concludes and writes."""
