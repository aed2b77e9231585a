"""Platform `cpu`: upstream without an accelerator."""
