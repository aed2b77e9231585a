"""Log-probs of rollout and actor: checks, correction, on-policy updates."""
