"""The record of a run: its files read, its pictures, the report of one run and the comparison of two."""
