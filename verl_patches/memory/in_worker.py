"""Ledger and order in verl's worker: what they watch and move, and where each phase begins and ends.

Providers of the rows memory.ledger* and memory.order*.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from verl.single_controller.base.decorator import Dispatch, register

from verl_patches.memory import conduct, measure, rollout_life
from verl_patches.memory import ledger as ledgers
from verl_patches.memory.followed import direct_sync, order_followed, staying, switches_of
from verl_patches.memory.ledger import Ledger, memory_of_process
from verl_patches.memory.movers import movers_of, movers_of_reference
from verl_patches.memory.phases import Order
from verl_patches.patching import engine

_TAGS = {"weights": "rollout_weights", "kv_cache": "kv_cache"}
_ASLEEP: set[str] = set()  # tags of vLLM's sleep mode, under which storages do not show what is there


def keep_ledger(init_model: Callable) -> Callable:
    """Row provider for ActorRolloutRefWorker.init_model: what the worker has built is watched from then on.

    The worker of the actor and that of the reference share a process, and a ledger.
    """

    @functools.wraps(init_model)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_model(self, *args, **kwargs)
        recipe = self.config.get("recipe")
        if recipe is not None and recipe.memory.ledger != "off":
            ledger = ledgers.current() or _new_ledger(self, recipe)
            _watch(self, recipe, ledger)
            ledger.take()  # what building the engine recorded belongs to no step
        return result

    return build


def _new_ledger(worker: Any, recipe: Any) -> Ledger:
    order, stays = _order_of(worker, recipe)
    found = Ledger(order, stays, recipe.memory.ledger, dist.get_rank(), memory_of_process(recipe.platform))
    ledgers.keep(found)
    return found


def _order_of(worker: Any, recipe: Any) -> tuple[Order, frozenset[str]]:
    """(the order that this run follows, who never moves), by its configuration and the rows that are on."""
    actor, ref = worker.config.actor.megatron, worker.config.ref.megatron
    switches = _switches(worker, recipe)
    stays = staying(
        param_offload=actor.param_offload, optimizer_offload=actor.optimizer_offload, ref_offload=ref.param_offload,
        one_memory=recipe.platform == "cpu", our_copies=switches["our_copies"], own_life=switches["own_life"],
        synced=_synced(recipe))  # fmt: skip
    return order_followed(recipe.line, skip_old_log_prob=recipe.train.skip_old_log_prob, **switches), stays


def _switches(worker: Any, recipe: Any) -> dict[str, bool]:
    return switches_of(engine.current().wanted, enforce_eager=worker.config.rollout.enforce_eager,
                       synced=_synced(recipe))


def _synced(recipe: Any) -> bool:
    return recipe.weight_sync.enabled and direct_sync(engine.current().wanted)


def keep_order(init_model: Callable) -> Callable:
    """Row provider for ActorRolloutRefWorker.init_model: from then on a conductor moves what the worker has built.

    The worker of the actor and that of the reference share a process, and a conductor.
    """

    @functools.wraps(init_model)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_model(self, *args, **kwargs)
        recipe = self.config.get("recipe")
        if recipe is not None:
            conductor = conduct.current() or _new_conductor(self, recipe)
            if self._is_actor:
                conductor.add(movers_of(self.actor_module, self.actor_optimizer))
            if self._is_ref:
                conductor.add(movers_of_reference(self.ref_module))
        return result

    return build


def _new_conductor(worker: Any, recipe: Any) -> conduct.Conductor:
    device = None if recipe.platform == "cpu" else torch.get_device_module(recipe.platform)
    order, stays = _order_of(worker, recipe)
    switches = _switches(worker, recipe)
    trim = conduct.trim_of(device, in_pool=switches["own_life"] and not switches["graphs"])
    conduct.keep(conduct.Conductor(order, trim, stays))
    return conduct.current()


def _watch(worker: Any, recipe: Any, ledger: Ledger) -> None:
    device = recipe.platform

    def bytes_of(tensors: Callable[[], Any]) -> Callable[[], int]:
        return lambda: measure.held_bytes(tensors(), device)

    if worker._is_actor:
        buffers, optimizer = measure.buffers_of(worker.actor_module), worker.actor_optimizer
        ledger.register("actor_params", bytes_of(lambda: [b.param_data for b in buffers]),
                        full_bytes=sum(b.numel * b.param_data.element_size() for b in buffers))
        ledger.register("grads", bytes_of(lambda: [b.grad_data for b in buffers]),
                        full_bytes=sum(b.numel * b.grad_data.element_size() for b in buffers))
        states, full = bytes_of(lambda: measure.optimizer_tensors(optimizer)), measure.optimizer_full_bytes(optimizer)
        whole, window = (int, states) if recipe.train.swap_optimizer else (states, int)  # int() is 0
        # at most that much; while the ledger looks, before the update, none of a window is there
        ledger.register("optimizer", whole, full_bytes=full if whole is states else 0, grows=True)
        ledger.register("swap_window", window, full_bytes=full if window is states else 0, grows=True)
    if worker._is_rollout:
        llm = worker.rollout.inference_engine
        model = measure.vllm_worker(llm).model_runner.model
        for tag, tensors in (("weights", lambda: rollout_life.all_weights(model).values()),
                             ("kv_cache", lambda: measure.kv_caches(llm))):  # fmt: skip
            ledger.register(_TAGS[tag], _unless_asleep(tag, bytes_of(tensors)))
        # they come and go within the sync: what it holds for a while is told to `look` (reshard/in_loop.py)
        ledger.register("reshard_buffers", functools.partial(_wire_bytes, worker), grows=True,
                        full_bytes=4 * recipe.reshard.bucket_bytes)
    if worker._is_ref:
        ledger.register("ref_params", bytes_of(lambda: measure.parameters_of(worker.ref_module)))


def _wire_bytes(worker: Any) -> int:
    """What the worker's resharder holds now; nothing is seen of verl's own path, nor before the first sync."""
    executor = getattr(getattr(worker.sharding_manager, "resharder", None), "executor", None)
    return executor.held_bytes if executor else 0


def _unless_asleep(tag: str, of_storages: Callable[[], int]) -> Callable[[], int]:
    return lambda: 0 if tag in _ASLEEP else of_storages()


def wake(wake_up: Callable) -> Callable:
    """Row provider for vLLM's LLM.wake_up: the phases reshard, for the weights, and wake_kv begin."""

    @functools.wraps(wake_up)
    def call(self: Any, tags: list[str] | None = None) -> None:
        for tag, phase in (("weights", "reshard"), ("kv_cache", "wake_kv")):
            if tags is None or tag in tags:
                conduct.begin(phase, functools.partial(_wake, wake_up, self, tag))

    return call


def _wake(wake_up: Callable, engine: Any, tag: str) -> None:
    wake_up(engine, [tag])
    _ASLEEP.discard(tag)


def sleep(original: Callable) -> Callable:
    """Row provider for vLLM's LLM.sleep: the phase sleep begins."""

    @functools.wraps(original)
    def call(self: Any, level: int = 1) -> None:
        ledgers.look()
        conduct.begin("sleep", functools.partial(_sleep, original, self, level))

    return call


def _sleep(original: Callable, engine: Any, level: int) -> None:
    original(engine, level)
    if measure.has_sleep_mode(engine):
        _ASLEEP.update(_TAGS)


def generate(original: Callable) -> Callable:
    """Row provider for vLLM's LLM.generate: the phase rollout begins, and ends when vLLM sleeps."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        conduct.begin("rollout")
        result = original(self, *args, **kwargs)
        ledgers.look()
        return result

    return call


def update(original: Callable) -> Callable:
    """Row provider for MegatronPPOActor.update_policy: the whole phase update."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        conduct.begin("update")
        result = original(self, *args, **kwargs)
        conduct.end()  # not after an error: whatever phase begins next leaves this one
        return result

    return call


def log_prob(original: Callable) -> Callable:
    """Row provider for MegatronPPOActor.compute_log_prob, which actor and reference share: old_log_prob or ref."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        conduct.begin("ref" if self.actor_optimizer is None else "old_log_prob")
        result = original(self, *args, **kwargs)
        conduct.end()
        return result

    return call


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_memory(self: Any) -> dict[str, Any] | None:
    """What this worker's ledger saw since the last call; None where none is kept."""
    ledger = ledgers.current()
    return {"rank": ledger.rank, **ledger.take()} if ledger else None
