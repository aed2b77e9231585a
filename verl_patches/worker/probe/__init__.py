"""Measure the devices of a run in its workers, before models: operators, process groups, the exchange of experts."""
