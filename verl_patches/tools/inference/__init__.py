"""Use the trained model: generate, chat, eval (docs/use.md)."""
