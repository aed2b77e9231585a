"""Compute how a model is split over ranks, and which tensors it has, as plain data without torch."""
