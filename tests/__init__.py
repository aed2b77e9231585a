"""One package of that name, before any that is installed."""
