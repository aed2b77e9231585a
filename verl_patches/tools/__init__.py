"""Prepare data before a run, and use the trained model after it."""
