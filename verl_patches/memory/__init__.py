"""What moves between host and device, and what it costs."""
