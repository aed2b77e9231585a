"""Run the step of one worker: verl's workers, sharding manager and rollout engine, and the context of a process."""

from typing import Any

# base of classes that a subclass row puts over upstream's: mypy takes names that they do not define for upstream's
Upstream: Any = object
