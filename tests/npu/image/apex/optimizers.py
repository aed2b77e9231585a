"""Stand in for apex/optimizers/__init__.py at 4ef930c1."""

from apex import refused

FusedAdam, FusedSGD = refused("FusedAdam"), refused("FusedSGD")
