"""Implement the features of one GRPO step, a folder each, with their state, their checks and their patches."""
