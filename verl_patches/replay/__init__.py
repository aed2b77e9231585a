"""Experts that the rollout chose: recorded, counted and replayed."""
