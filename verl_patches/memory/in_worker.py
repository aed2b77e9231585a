"""The ledger in verl's worker: what it watches, and where each phase begins. Providers of the rows memory.ledger*."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from verl.single_controller.base.decorator import Dispatch, register

from verl_patches.memory import ledger as ledgers
from verl_patches.memory import measure
from verl_patches.memory.ledger import Ledger, memory_of_process
from verl_patches.memory.phases import order_followed, staying
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
    actor, ref = worker.config.actor.megatron, worker.config.ref.megatron
    rows = engine.current().wanted
    direct, our_moves = any(row.startswith("reshard.direct") for row in rows), "memory.offload_model" in rows
    stays = staying(
        param_offload=actor.param_offload, optimizer_offload=actor.optimizer_offload, ref_offload=ref.param_offload,
        one_memory=recipe.platform == "cpu", our_moves=our_moves)  # fmt: skip
    if "memory.rollout_life" in rows and worker.config.rollout.enforce_eager:
        synced = recipe.weight_sync.enabled
        stays = stays - {"rollout_weights"} if synced else stays | {"rollout_weights"}
    order = order_followed(recipe.line, direct_sync=direct, skip_old_log_prob=recipe.train.skip_old_log_prob,
                           our_moves=our_moves)
    found = Ledger(order, stays, recipe.memory.ledger, dist.get_rank(), memory_of_process(recipe.platform))
    ledgers.keep(found)
    return found


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
        full = 0 if recipe.train.swap_optimizer else measure.optimizer_full_bytes(optimizer)
        ledger.register("optimizer", bytes_of(lambda: measure.optimizer_tensors(optimizer)), full_bytes=full,
                        grows=True)
    if worker._is_rollout:
        llm = worker.rollout.inference_engine
        model = measure.vllm_worker(llm).model_runner.model
        for tag, tensors in (("weights", model.parameters), ("kv_cache", lambda: measure.kv_caches(llm))):
            ledger.register(_TAGS[tag], _unless_asleep(tag, bytes_of(tensors)))
    if worker._is_ref:
        ledger.register("ref_params", bytes_of(lambda: measure.parameters_of(worker.ref_module)))


def _unless_asleep(tag: str, of_storages: Callable[[], int]) -> Callable[[], int]:
    return lambda: 0 if tag in _ASLEEP else of_storages()


def wake(wake_up: Callable) -> Callable:
    """Row provider for vLLM's LLM.wake_up: rollout weights are there (reshard), or the KV cache is too (wake_kv)."""

    @functools.wraps(wake_up)
    def call(self: Any, tags: list[str] | None = None) -> Any:
        result = wake_up(self, tags)
        _ASLEEP.difference_update(_TAGS if tags is None else tags)
        ledgers.enter("wake_kv" if tags is None or "kv_cache" in tags else "reshard")
        return result

    return call


def sleep(original: Callable) -> Callable:
    """Row provider for vLLM's LLM.sleep."""

    @functools.wraps(original)
    def call(self: Any, level: int = 1) -> Any:
        ledgers.look()
        result = original(self, level)
        if measure.has_sleep_mode(self):
            _ASLEEP.update(_TAGS)
        ledgers.enter("sleep")
        return result

    return call


def generate(original: Callable) -> Callable:
    """Row provider for vLLM's LLM.generate."""
    return _begins("rollout", original)


def update(original: Callable) -> Callable:
    """Row provider for MegatronPPOActor.update_policy, before which verl has brought all that it needs."""
    return _begins("update", original)


def log_prob(original: Callable) -> Callable:
    """Row provider for MegatronPPOActor.compute_log_prob, which actor and reference share."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ledgers.enter("ref" if self.actor_optimizer is None else "old_log_prob")
        result = original(self, *args, **kwargs)
        ledgers.look()
        return result

    return call


def _begins(phase: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ledgers.enter(phase)
        result = original(self, *args, **kwargs)
        ledgers.look()
        return result

    return call


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_memory(self: Any) -> dict[str, Any] | None:
    """What this worker's ledger saw since the last call; None where none is kept."""
    ledger = ledgers.current()
    return {"rank": ledger.rank, **ledger.take()} if ledger else None
