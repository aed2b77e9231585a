"""Tensors that stay on devices between the stages of a step: batch plan, micro batches, ragged exchange, the cache."""
