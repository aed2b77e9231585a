"""What a rollout made, recorded and replayed: its responses, and the experts that it chose; the load of experts."""
