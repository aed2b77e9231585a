"""Ray of a run on all its nodes: start it, look at it, end it, from one job file."""
