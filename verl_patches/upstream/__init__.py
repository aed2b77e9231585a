"""The pinned upstream sources: pins, checkouts, versions."""
