"""Build vLLM's LLM for verl's rollout, and begin the memory phases of its calls."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import wrapt

from verl_patches.current import Current
from verl_patches.heartbeat import heartbeat
from verl_patches.memory.sleep_mode import SleepMode, require_freed_memory
from verl_patches.patching import engine
from verl_patches.patching.engine import is_on
from verl_patches.rollout.ascend import raise_on_dropped
from verl_patches.rollout.engine import PreemptionCounter, dp_ranks, engine_arguments
from verl_patches.step.replay.sample_seeds import seeded_params
from verl_patches.worker import Upstream
from verl_patches.worker.context import context
from verl_patches.worker.memory import device_type, free_memory_device, rollout_groups

weights_move: Current[bool] = Current(False)  # whether the engine's weights change their addresses at wake-up
_TAG_PHASES = {"weights": "reshard", "kv_cache": "wake_kv"}  # vLLM's tags of LLM.wake_up


class RolloutEngine(Upstream):
    """Override methods of vLLM's LLM (row rollout.engine).

    Phases begin here, and not in verl's worker, because verl 0.4.0 and 54c9b736 wake and sleep the engine at different
    places (0.4.0: megatron_workers.py, generate_sequences; 54c9b736: megatron_vllm.py, __enter__). The next call of
    `generate` uses up `sample_seeds`, a seed for each prompt.
    """

    sample_seeds: Sequence[int] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if is_on("rollout.llm_arguments"):
            kwargs = engine_arguments(kwargs)
        our_sleep_mode = bool(kwargs.get("enable_sleep_mode")) and is_on("memory.sleep_mode")
        if our_sleep_mode:
            kwargs["enable_sleep_mode"] = False
            weights_move.value = True
        super().__init__(*args, **kwargs)
        self.sleep_mode: SleepMode | None = None
        self.preemptions = PreemptionCounter(self.llm_engine)
        self.awake = set(_TAG_PHASES)
        if (dp_group := getattr(self.llm_engine, "dp_group", None)) is not None:  # V1 syncs on it each decode step
            heartbeat.current_heartbeat().count_group(
                dp_group, "vLLM's dp", dp_ranks(self.llm_engine.vllm_config.parallel_config)
            )
        options = kwargs.get("additional_config") or {}
        if (options.get("ascend_scheduler_config") or {}).get("enabled"):
            self.llm_engine.step = raise_on_dropped(self.llm_engine)
        if our_sleep_mode:
            loaded = kwargs.get("load_format") != "dummy" or not is_on("reshard.direct")
            self.sleep_mode = SleepMode(self, loaded=loaded)
            self.llm_engine.sleep, self.llm_engine.wake_up = self.sleep_mode.sleep, self.sleep_mode.wake_up
            self.llm_engine.add_request = _refuse_unready(self.sleep_mode, self.llm_engine.add_request)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake the weights in phase reshard, then the KV cache in phase wake_kv; skip a tag that is awake."""
        for tag, phase in _TAG_PHASES.items():
            if tag not in self.awake and (tags is None or tag in tags):
                context().begin(phase, functools.partial(self._wake_tag, tag))

    def _wake_tag(self, tag: str) -> None:
        super().wake_up([tag])
        self.awake.add(tag)

    def generate(self, prompts: Any = None, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generate in phase rollout, which lasts until the engine sleeps."""
        context().begin("rollout")
        seeds, self.sample_seeds = self.sample_seeds, None
        params = sampling_params if seeds is None else seeded_params(sampling_params, seeds)
        with garbage_collection_off(is_on("rollout.no_collector")):
            outputs = super().generate(prompts, params, *args, **kwargs)
        context().raise_peak()
        return outputs

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache, in phase sleep; memory/sleep_mode.py describes its RecipeError."""
        here, device, sleep = context(), free_memory_device.value, functools.partial(self._sleep, level)
        here.raise_peak()
        if device is None:
            here.begin("sleep", sleep)
        else:
            with require_freed_memory(device, self.held_bytes, by_vllm=self.sleep_mode is None):
                here.begin("sleep", sleep)
                if here.scheduler is None:  # at the start, and in verl's own order
                    device.empty_cache()
        here.trace(None)

    def _sleep(self, level: int) -> None:
        super().sleep(level)
        self.awake.clear()

    def held_bytes(self) -> dict[str, int]:
        """Return {memory group: bytes on the device}."""
        groups = rollout_groups(self, device_type(engine.current_engine().switches.platform))
        return {group: held() for group, held in groups.items()}

    def mark_weights_written(self, last: bool) -> None:
        """Note that a weight sync has written every weight; `last`: no sync follows, so sleep must keep them."""
        if self.sleep_mode is not None:
            self.sleep_mode.mark_weights_written(last)


@contextmanager
def garbage_collection_off(wanted: bool) -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the context if `wanted`; restore it also after an error.

    A decode step makes objects for each request, which start a collection every few steps. A full collection visits all
    objects of the process while its device, and those that exchange experts with it, wait. Garbage made meanwhile is
    collected by the first collection afterwards.
    """
    if not wanted or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refuse_unready(sleep_mode: SleepMode, add_request: Callable) -> Callable:
    @functools.wraps(add_request)
    def add(*args: Any, **kwargs: Any) -> Any:
        sleep_mode.check_ready()
        return add_request(*args, **kwargs)

    return add


class _Torchair(wrapt.ObjectProxy):
    def get_npu_backend(self, *, compiler_config: Any = None, **more: Any) -> Callable:
        """Return torchair's backend; its graph reads addresses of Parameters at each call if sleep moves weights."""
        if weights_move.value:
            compiler_config.experimental_config.frozen_parameter = False
        return self.__wrapped__.get_npu_backend(compiler_config=compiler_config, **more)


def torchair_with_live_addresses(torchair: ModuleType) -> Any:
    """Replace the name `torchair` in vllm-ascend's model runner by a proxy that unfreezes parameters.

    vllm_ascend.worker.model_runner_v1.NPUModelRunner._get_torchair_lazy_compiled_model sets frozen_parameter: a graph
    stores the addresses that its torch.nn.Parameter inputs had at its first call. All other inputs, including KV cache
    and absorbed projections, have the addresses of each call.
    """
    return _Torchair(torchair)
