"""Schemas of the torch_npu functions that are called on our paths, as read from the pinned wheel (see reader.py)."""
