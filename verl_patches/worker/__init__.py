"""The step of one worker, written down once: worker, sharding manager, rollout engine, and what a process shares."""

from typing import Any

# base of classes that a subclass row puts over upstream's: for mypy, a name that they do not define is upstream's
Upstream: Any = object
