"""Which life a new vLLM engine has between two rollouts: graph_life.py for captured graphs, else rollout_life.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from verl_patches.memory.schedule import direct_sync
from verl_patches.memory.sleep_mode import GraphLife
from verl_patches.memory.sleep_mode import Life, RolloutLife
from verl_patches.patching import engine as patches

def taken_over(original: Callable) -> Callable:
    """Row provider for LLM.__init__: an engine that is to sleep has our life, an eager one no sleep mode of vLLM's.

    Its sleep, wake_up and add_request are ours from then on, below LLM's methods of these names.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        sleeps, eager = bool(kwargs.get("enable_sleep_mode")), bool(kwargs.get("enforce_eager"))
        original(self, *args, **{**kwargs, "enable_sleep_mode": False} if sleeps and eager else kwargs)
        if sleeps:
            stay = kwargs.get("load_format") != "dummy" or not direct_sync(patches.current().wanted)
            self.rollout_life = life = (RolloutLife if eager else GraphLife)(self, loaded=stay)
            engine = self.llm_engine
            engine.sleep, engine.wake_up = life.sleep, life.wake_up
            engine.add_request = _guarded(life, engine.add_request)

    return __init__


def _guarded(life: Life, add_request: Callable) -> Callable:
    @functools.wraps(add_request)
    def add(*args: Any, **kwargs: Any) -> Any:
        life.check_ready()
        return add_request(*args, **kwargs)

    return add
