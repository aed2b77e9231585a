"""Import the prelude in every process that needs it: by a .pth finder, verl's worker module and a vLLM plugin."""
