"""Batches of a step: tensor cache, packing, dynamic micro batches."""
