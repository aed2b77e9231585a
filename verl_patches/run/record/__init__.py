"""Read the record of a run, draw it, report one run, and compare two."""
