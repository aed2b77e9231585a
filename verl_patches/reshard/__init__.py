"""From training weights to rollout weights."""
