"""Start, look at and end the Ray of a run on all its nodes, from one job file."""
