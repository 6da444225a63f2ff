"""What gluonpar verify --report FILE.json measures, concludes and writes."""
