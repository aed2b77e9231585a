"""Watch a run: see its processes on each node, and find the rank that the others wait for."""
