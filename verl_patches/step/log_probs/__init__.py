"""Check and correct log-probs of rollout and actor, and run on-policy updates."""
