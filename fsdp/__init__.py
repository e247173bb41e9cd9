"""FSDP2, or one plain process."""
