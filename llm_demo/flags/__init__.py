"""Flags of the training scripts: declared once, parsed, checked."""
