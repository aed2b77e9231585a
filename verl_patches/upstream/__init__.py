"""Manage the pinned upstream sources: pins, checkouts, versions."""
