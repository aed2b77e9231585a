"""Record and replay a rollout's responses and the pass's routed experts, and measure expert load."""
