"""Looking at finished runs."""
