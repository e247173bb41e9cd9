"""The machine: its devices, processes, files and network, and how fast they are."""
