"""The trainer's and the workers' side of a run: start, proofs before step 1, truth check, record."""
