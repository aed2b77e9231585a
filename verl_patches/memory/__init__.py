"""Move memory between host and device, and measure it."""
