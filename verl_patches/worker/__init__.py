"""Run the step of one worker: verl's workers, sharding manager and rollout engine, and the context of a process."""

from typing import Any

# base of our classes that a row combines with an upstream class: type(name, (ours, upstream), ...). As Any it lets mypy
# accept upstream's methods and attributes in them.
Upstream: Any = object
