"""A run's life: what is decided before it, its log, records and checkpoints."""
