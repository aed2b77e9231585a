"""Record and read what each worker and the controller are doing while a run lasts; no torch."""
