"""The controller's side of a run: handshake, step, record and checks, checkpoints, dispatch of calls."""
