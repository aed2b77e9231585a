"""What a run would use before anything is started: checks, memory, step time, a search of layouts; no torch."""
