"""FSDP2 inside a pipeline."""
