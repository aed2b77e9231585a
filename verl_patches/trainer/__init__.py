"""The controller's side of a run: start, worker handshake before step 1, truth check, step record."""
