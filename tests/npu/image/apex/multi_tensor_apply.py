"""Stand in for apex/multi_tensor_apply/__init__.py at 4ef930c1."""

from apex import refused

multi_tensor_applier = refused("multi_tensor_applier")
