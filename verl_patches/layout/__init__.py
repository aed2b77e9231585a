"""How a model is split over ranks, and which tensors it has: plain data, computed without torch."""
