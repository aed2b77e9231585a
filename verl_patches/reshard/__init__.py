"""Sync weights from training memory directly into rollout memory."""
