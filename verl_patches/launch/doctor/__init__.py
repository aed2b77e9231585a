"""Check that a machine is ready: the checks of one node, and of all nodes of a Ray."""
