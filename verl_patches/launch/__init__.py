"""From a configuration to a supervised run: driver process, Ray, smoke runs."""
