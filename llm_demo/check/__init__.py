"""A command for people: can this machine train? It imports torch in processes of its own only."""
