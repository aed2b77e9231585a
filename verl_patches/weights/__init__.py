"""Weights on disk: one format of sharded folders, conversion between it and HF folders, FP8 block scales."""
