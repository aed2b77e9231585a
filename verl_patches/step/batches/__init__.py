"""Plan and hold the batches of a step: tensor cache, packing, dynamic micro batches."""
