"""Resolve a run: its configuration, environment, ports, folder and record, and the rules that it must keep."""
