"""What one stage of a step leaves for the next: batch plans, micro batches, tensors that stay on the device."""
