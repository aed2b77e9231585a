"""Define the commands of `python -m verl_patches`."""
