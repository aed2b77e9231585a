"""Run the controller's side of training: handshake, steps, records, checks, checkpoints, dispatch of calls."""
