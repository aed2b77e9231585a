"""The recipe: the settings of a run that verl's own configuration does not have, as dataclasses."""
