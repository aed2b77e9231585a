"""Watching a run: what each node sees of its processes, and which rank a run waits for."""
