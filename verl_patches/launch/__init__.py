"""From a configuration to a supervised run: plan, driver process, Ray, smoke runs."""
