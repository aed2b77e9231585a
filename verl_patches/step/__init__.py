"""The features of one GRPO step, a folder each, with their state, their rules and the providers of their rows."""
