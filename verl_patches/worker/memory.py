"""Connect one worker to its process's memory schedule: register its memory groups with ledger and scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
import wrapt

from verl_patches.current import Current
from verl_patches.memory import measure, sleep_mode
from verl_patches.memory.host_backed import model_offload_state
from verl_patches.memory.ledger import Ledger, process_memory_meter
from verl_patches.memory.offload import Params, training_handlers
from verl_patches.memory.schedule import ACTOR, CRITIC, TrainedGroups, groups_without_offload, schedule_for_run
from verl_patches.memory.scheduler import Scheduler
from verl_patches.patching import engine
from verl_patches.platform import NO_DEVICE, device_module
from verl_patches.spec import RunSpec
from verl_patches.worker.context import context

# torch.npu, whose free memory is checked after the rollout sleeps; None on a CPU and with recipe.memory.ledger=off
free_memory_device: Current[ModuleType | None] = Current(None)


class TrainedModel(NamedTuple):
    """Hold a model that a worker trains: its chunks in DDP, Megatron's optimizer, HF config and memory groups."""

    chunks: Sequence[torch.nn.Module]
    optimizer: Any
    hf_config: Any
    groups: TrainedGroups = ACTOR


class WorkerMemory:
    """Manage the memory of one of verl's workers, from verl's section `config` and the run.

    The workers of a process share ledger and scheduler.

    `scheduled`: whether our schedule moves the worker's memory (row memory.order); otherwise verl's worker moves it,
    and there is no ledger, as row memory.ledger needs memory.order.
    """

    def __init__(self, config: Any, run: RunSpec):
        recipe = self.recipe = run.recipe
        self.checks_memory = recipe.memory.ledger != "off" and engine.is_on("memory.ledger")
        if self.checks_memory:
            free_memory_device.value = device_module(recipe.platform)
        self.scheduled, here = "memory.order" in run.rows, context()
        if "ppo_epochs" in config:  # critic: the actor's worker, made first, has set the rest of the schedule
            assert here.schedule is not None
            here.schedule, here.unmoved_groups = (
                here.schedule.with_critic(),
                here.unmoved_groups | groups_without_offload(config.megatron, CRITIC),
            )
        elif here.schedule is None:
            here.schedule, here.unmoved_groups = schedule_for_run(run, config, unified_memory=run.platform in NO_DEVICE)

    def offload_model(
        self, chunks: Sequence[torch.nn.Module], optimizer: Any = None, groups: TrainedGroups = ACTOR
    ) -> None:
        """Offload a model that verl has just built, as verl would; the reference has no optimizer."""
        if not self.scheduled:
            return
        trained = {} if optimizer is None else training_handlers(chunks, optimizer, groups)
        for group, handler in (trained or {"ref_params": Params(chunks)}).items():
            if group in context().unmoved_groups:
                continue
            if group == groups.grads:
                handler.free()
            else:
                handler.offload()

    def register_worker(self, worker: Any, trained: TrainedModel | None) -> None:
        """Register what `worker` has built and trains with the ledger and the scheduler of this process."""
        here = context()
        if not self.scheduled:
            return
        assert here.schedule is not None  # `__init__` sets it
        if self.checks_memory:
            if here.ledger is None:
                rank, measured = dist.get_rank(), process_memory_meter(device_type(self.recipe.platform))
                here.ledger = Ledger(here.schedule, here.unmoved_groups, self.recipe.memory.ledger, rank, measured)
            self._register_groups(worker, trained, here.ledger)
            here.ledger.take()  # drop the records from building the engine
        if here.scheduler is None:
            device = device_module(self.recipe.platform)
            here.scheduler = Scheduler(
                here.schedule, None if device is None else device.empty_cache, here.unmoved_groups
            )
        here.scheduler.ledger = here.ledger
        if trained is not None:
            here.scheduler.add(training_handlers(trained.chunks, trained.optimizer, trained.groups))
        if getattr(worker, "_is_ref", False):  # verl's other workers have no such attribute
            here.scheduler.add({"ref_params": Params(worker.ref_module)})

    def _register_groups(self, worker: Any, trained: TrainedModel | None, ledger: Ledger) -> None:
        if trained is not None:
            self._register_training(trained, ledger)
        if getattr(worker, "_is_rollout", False):
            self._register_rollout(worker, ledger)
        if getattr(worker, "_is_ref", False):
            ledger.register("ref_params", self._byte_counter(lambda: [list(m.parameters()) for m in worker.ref_module]))
        if models := getattr(worker, "reward_models", ()):
            chunks = [chunk for model in models for chunk in model.reward_model_module]
            ledger.register("reward_params", self._byte_counter(lambda: [list(m.parameters()) for m in chunks]))

    def _register_training(self, trained: TrainedModel, ledger: Ledger) -> None:
        optimizer, groups = trained.optimizer, trained.groups
        buffers = [b for chunk in trained.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        ledger.register(groups.params, self._byte_counter(lambda: [buffer.param_data for buffer in buffers]))
        ledger.register(groups.grads, self._byte_counter(lambda: [buffer.grad_data for buffer in buffers]))
        states = self._byte_counter(lambda: measure.optimizer_tensors(optimizer))
        full = measure.optimizer_full_bytes(optimizer)
        # With swap_optimizer only a window of the states, `full` at most, is on the device, and only during a step; the
        # ledger checks at a phase's start, when the window is empty.
        holds, empty = groups.optimizer, groups.window
        if self.recipe.train.swap_optimizer:
            holds, empty = empty, holds
        ledger.register(holds, states, full_bytes=full, partial_at_first=True)
        ledger.register(empty, lambda: 0, full_bytes=0, partial_at_first=True)

    def _register_rollout(self, worker: Any, ledger: Ledger) -> None:
        groups = rollout_groups(worker.rollout.inference_engine, device_type(self.recipe.platform))
        for group, tag_bytes in groups.items():
            ledger.register(group, tag_bytes)
        # Allocated and freed inside the sync, which passes its peak to the ledger (worker/sharding.py).
        most = 4 * self.recipe.reshard.bucket_bytes
        ledger.register("reshard_buffers", lambda: _buffer_bytes(worker), full_bytes=most, partial_at_first=True)

    def _byte_counter(self, tensors: Callable[[], Any]) -> Callable[[], int]:
        return lambda: measure.held_bytes(tensors(), device_type(self.recipe.platform))

    @contextmanager
    def all_on_device(self, trained: TrainedModel) -> Iterator[None]:
        """Keep weights and states, which a checkpoint replaces, on the device inside; then offload them again.

        Without our schedule verl moves the parameters itself.
        """
        scheduler = context().scheduler
        if scheduler is None:
            yield
            return
        offloaded = scheduler.offloaded_handlers((trained.groups.params, trained.groups.optimizer))
        for handler in offloaded:
            handler.load()
        try:
            yield
        finally:
            for chunk in trained.chunks:
                model_offload_state(chunk).written = True
            for handler in offloaded:
                handler.offload()


def _buffer_bytes(worker: Any) -> int:
    """Return the bytes that the worker's resharder holds now; 0 on verl's own path and before the first sync."""
    executor = getattr(getattr(worker.sharding_manager, "resharder", None), "executor", None)
    return executor.buffer_bytes if executor else 0


def rollout_groups(llm: Any, device_type: str) -> dict[str, Callable[[], int]]:
    """Return {memory group: function that returns its bytes on the device} of the engine `llm`.

    A function returns 0 while vLLM's own sleep mode has unmapped the memory, although tensors still point to it.
    """

    def tag_bytes(tag: str) -> int:
        sleeps = llm.llm_engine.vllm_config.model_config.enable_sleep_mode
        if sleeps and tag not in getattr(llm, "awake", (tag,)):
            return 0
        tensors: Iterable[Any] = measure.kv_caches(llm)
        if tag == sleep_mode.WEIGHTS:
            tensors = sleep_mode.all_weights(measure.vllm_worker(llm).model_runner.model).values()
        return measure.held_bytes(tensors, device_type)

    tags = {"rollout_weights": sleep_mode.WEIGHTS, "kv_cache": sleep_mode.CACHE}
    return {group: functools.partial(tag_bytes, tag) for group, tag in tags.items()}


def device_type(platform: str) -> str:
    """Return the device type of a platform's tensors."""
    return "cpu" if platform in NO_DEVICE else platform


class _Cuda(wrapt.ObjectProxy):
    def empty_cache(self) -> None:
        """Call torch.cuda.empty_cache; do nothing if a scheduler moves memory."""
        if context().scheduler is None:
            self.__wrapped__.empty_cache()


class _Torch(wrapt.ObjectProxy):
    @property
    def cuda(self) -> _Cuda:
        return _Cuda(self.__wrapped__.cuda)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return torch_without_empty_cache, (self.__wrapped__,)  # Ray pickles functions with their globals


def torch_without_empty_cache(torch: ModuleType) -> Any:
    """Replace the name `torch` in one module of verl: its empty_cache does nothing if we schedule memory.

    On an NPU a patch of torch.cuda itself would be overwritten: transfer_to_npu sets torch.cuda's names at its import.
    """
    return _Torch(torch)
