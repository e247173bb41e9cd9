"""What surrounds the numbers of a run: flags, decisions, machine, log, records, checkpoints."""
