"""Watching a run: heartbeats of its processes, what each node sees of them, and which rank a run waits for."""
