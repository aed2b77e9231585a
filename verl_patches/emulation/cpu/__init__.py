"""Run upstream without an accelerator: platform `cpu`."""
