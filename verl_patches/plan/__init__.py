"""Plan a run before anything is started: checks, memory, step time, a search of layouts; no torch."""
