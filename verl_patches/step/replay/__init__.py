"""Record and replay responses of a rollout and experts that routers chose, and measure expert load."""
