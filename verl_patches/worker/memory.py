"""The memory of one worker: which schedule its process follows, what the ledger watches, what the scheduler moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.memory import measure, sleep_mode
from verl_patches.memory.host_backed import offload_state_of_model, offload_state_of_optimizer, single_optimizers
from verl_patches.memory.ledger import Ledger, memory_of_process
from verl_patches.memory.offload import Optimizer, Params, actor_handlers, reference_handlers
from verl_patches.memory.schedule import direct_sync, schedule_followed, staying, switches_of
from verl_patches.memory.scheduler import Scheduler, empty_cache_of
from verl_patches.patching import engine
from verl_patches.worker.context import context

_GROUP_OF_TAG = {"weights": "rollout_weights", "kv_cache": "kv_cache"}  # vLLM's tags of LLM.wake_up


class WorkerMemory:
    """Memory of one of verl's workers, by its `config` and `recipe`; actor and reference share ledger and scheduler.

    `scheduled`: whether the schedule of this project moves what the worker builds (row memory.order), not verl.
    """

    def __init__(self, config: Any, recipe: Any):
        self.recipe = recipe
        rows, actor = engine.current().wanted, config.actor.megatron
        synced = recipe.weight_sync.enabled and direct_sync(rows)
        self.switches = switches_of(rows, enforce_eager=config.rollout.enforce_eager, synced=synced)
        self.scheduled = self.switches["our_schedule"]
        skip = recipe.train.skip_old_log_prob
        self.schedule = schedule_followed(recipe.line, skip_old_log_prob=skip, **self.switches)
        self.stays = staying(
            param_offload=actor.param_offload,
            optimizer_offload=actor.optimizer_offload,
            ref_offload=config.ref.megatron.param_offload,
            one_memory=recipe.platform == "cpu",
            our_schedule=self.scheduled,
            own_sleep_mode=self.switches["own_sleep_mode"],
            synced=synced,
        )

    def built(self, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """verl has built a model, of the actor if it has an optimizer: it goes to the host, as verl would take it."""
        if not self.scheduled:
            return
        handlers = reference_handlers(chunks) if optimizer is None else actor_handlers(chunks, optimizer)
        for group in ("grads", "actor_params", "ref_params", "optimizer"):
            if group in handlers and group not in self.stays:
                handler = handlers[group]
                handler.free() if group == "grads" else handler.offload()

    def start(self, worker: Any) -> None:
        """From here on the process's ledger watches what `worker` has built, and its scheduler moves it."""
        here = context()
        if is_ledger_on(self.recipe):
            if here.ledger is None:
                here.ledger = Ledger(
                    self.schedule,
                    self.stays,
                    self.recipe.memory.ledger,
                    dist.get_rank(),
                    memory_of_process(self.recipe.platform),
                )
            self._watch(worker, here.ledger)
            here.ledger.take()  # what was recorded while the engine was built belongs to no step
            if not self.scheduled:
                _check_inside(worker, here.ledger)
        if self.scheduled:
            if here.scheduler is None:
                here.scheduler = self._new_scheduler()
            here.scheduler.ledger = here.ledger
            if worker._is_actor:
                here.scheduler.add(actor_handlers(worker.actor_module, worker.actor_optimizer))
            if worker._is_ref:
                here.scheduler.add(reference_handlers(worker.ref_module))

    def _new_scheduler(self) -> Scheduler:
        device = None if self.recipe.platform == "cpu" else torch.get_device_module(self.recipe.platform)
        in_pool = self.switches["own_sleep_mode"] and not self.switches["graphs"]
        return Scheduler(self.schedule, empty_cache_of(device, in_pool), self.stays)

    def _watch(self, worker: Any, ledger: Ledger) -> None:
        if worker._is_actor:
            self._watch_training(worker, ledger)
        if worker._is_rollout:
            self._watch_rollout(worker, ledger)
        if worker._is_ref:
            ledger.register("ref_params", self._bytes_of(lambda: measure.parameters_of(worker.ref_module)))

    def _watch_training(self, worker: Any, ledger: Ledger) -> None:
        buffers, optimizer = measure.buffers_of(worker.actor_module), worker.actor_optimizer
        ledger.register(
            "actor_params",
            self._bytes_of(lambda: [b.param_data for b in buffers]),
            full_bytes=sum(b.numel * b.param_data.element_size() for b in buffers),
        )
        ledger.register(
            "grads",
            self._bytes_of(lambda: [b.grad_data for b in buffers]),
            full_bytes=sum(b.numel * b.grad_data.element_size() for b in buffers),
        )
        states = self._bytes_of(lambda: measure.optimizer_tensors(optimizer))
        full = measure.optimizer_full_bytes(optimizer)
        # A swapped step has at most `full` in its window; while the ledger looks, before the update, it has nothing.
        holds, empty = "optimizer", "swap_window"
        if self.recipe.train.swap_optimizer:
            holds, empty = empty, holds
        ledger.register(holds, states, full_bytes=full, grows=True)
        ledger.register(empty, lambda: 0, full_bytes=0, grows=True)

    def _watch_rollout(self, worker: Any, ledger: Ledger) -> None:
        llm = worker.rollout.inference_engine
        model = measure.vllm_worker(llm).model_runner.model
        for tag, tensors in (
            ("weights", lambda: sleep_mode.all_weights(model).values()),
            ("kv_cache", lambda: measure.kv_caches(llm)),
        ):
            ledger.register(_GROUP_OF_TAG[tag], _unless_unmapped(llm, tag, self._bytes_of(tensors)))
        # Allocated and freed within the sync: what it holds for a while is passed to `look` (worker/sharding.py).
        ledger.register(
            "reshard_buffers",
            functools.partial(_wire_bytes, worker),
            grows=True,
            full_bytes=4 * self.recipe.reshard.bucket_bytes,
        )

    def _bytes_of(self, tensors: Callable[[], Any]) -> Callable[[], int]:
        return lambda: measure.held_bytes(tensors(), self.recipe.platform)

    @contextmanager
    def all_on_device(self, chunks: Sequence[torch.nn.Module], optimizer: Any, writes: bool) -> Iterator[None]:
        """Parameters and optimizer states are on the device inside, and where they were afterwards.

        `writes`: weights and states may be replaced inside. Without our schedule verl brings the parameters by itself.
        """
        scheduler = context().scheduler
        models = list(map(offload_state_of_model, chunks)) if scheduler is not None else []
        offloaded = []
        if any(each.offloaded for each in models):
            offloaded.append(Params(chunks))
        if any(offload_state_of_optimizer(one).offloaded for one in single_optimizers(optimizer)):
            offloaded.append(Optimizer(optimizer))
        for handler in offloaded:
            handler.load()
        try:
            yield
        finally:
            for each in models:
                each.written = each.written or writes
            for handler in offloaded:
                handler.offload()
            if writes and self._belongs_on_host(optimizer):
                Optimizer(optimizer).offload()  # states created by load_checkpoint

    def _belongs_on_host(self, optimizer: Any) -> bool:
        """Whether optimizer states are to be on the host now; without our schedule verl's own call takes them there."""
        if any(offload_state_of_optimizer(one).swapped for one in single_optimizers(optimizer)):
            return True
        scheduler = context().scheduler
        return scheduler is not None and scheduler.moves("optimizer") and not scheduler.has("optimizer")


def _check_inside(worker: Any, ledger: Ledger) -> None:
    """verl's own order: the ledger checks inside the actor's calls, before which verl's worker loads."""
    if worker._is_actor:
        _check_call(worker.actor, "compute_log_prob", ledger, "old_log_prob")
        _check_call(worker.actor, "update_policy", ledger, "update")
    if worker._is_ref:
        _check_call(worker.ref_policy, "compute_log_prob", ledger, "ref")


def _check_call(actor: Any, method: str, ledger: Ledger, phase: str) -> None:
    call = getattr(actor, method)

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        ledger.enter(phase)
        result = call(*args, **kwargs)
        ledger.look()
        return result

    setattr(actor, method, checked)


def is_ledger_on(recipe: Any) -> bool:
    """Whether `recipe` wants a ledger, and its row is on."""
    return recipe.memory.ledger != "off" and engine.is_on("memory.ledger")


def _wire_bytes(worker: Any) -> int:
    """What the worker's resharder holds now; nothing is seen of verl's own path, nor before the first sync."""
    executor = getattr(getattr(worker.sharding_manager, "resharder", None), "executor", None)
    return executor.held_bytes if executor else 0


def _unless_unmapped(llm: Any, tag: str, of_storages: Callable[[], int]) -> Callable[[], int]:
    """vLLM's own sleep mode unmaps memory that tensors go on pointing at: asleep, they hold nothing."""

    def measured() -> int:
        unmapped = measure.has_sleep_mode(llm) and tag not in getattr(llm, "awake", (tag,))
        return 0 if unmapped else of_storages()

    return measured
