"""The trained model in use: generate, chat, eval (docs/use.md)."""
