"""The commands of `python -m verl_patches`."""
