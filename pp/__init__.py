"""A DeepSpeed pipeline."""
