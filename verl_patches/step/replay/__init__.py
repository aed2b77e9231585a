"""Record and replay responses of a rollout, seed them, replay experts that routers chose, measure expert load."""
