"""Is a machine ready: checks of a node and of all nodes of a Ray."""
