"""Bring a machine up by proof, from its operators to a resumed run on one node."""
