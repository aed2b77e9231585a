"""Bring a run up by proof, from one die to all: each rung compares something before the next one starts."""
