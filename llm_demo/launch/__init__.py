"""Starts a script's ranks, on one node or several."""
