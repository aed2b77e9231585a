"""What our recipe adds to verl's ActorRolloutRefWorker: weight-sync mode, proofs before step 1, phase seconds.

Imported only once verl.workers.megatron_workers is (as a provider of catalogue rows).

Ledger and order in verl's worker: what they watch and move, and where each phase begins and ends.

Providers of the rows memory.ledger* and memory.order*.

Checkpoints find weights and optimizer states on the device, and leave them where they were. No phase of a step.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl_patches.trainer import dispatch
from verl_patches.layout.of_config import rollout_layout_in, train_layout_in
from verl_patches.memory import counters
from verl_patches.patching import engine
from verl_patches.reshard.weight_sync import Settings
import torch.distributed as dist
from verl_patches.memory import measure, scheduler, sleep_mode
from verl_patches.memory import ledger as ledgers
from verl_patches.memory.schedule import direct_sync, order_followed, staying, switches_of
from verl_patches.memory.ledger import Ledger, memory_of_process
from verl_patches.memory.offload import movers_of, movers_of_reference
from verl_patches.memory.schedule import Order
from verl_patches.memory import scheduler
from verl_patches.memory.host_backed import places_of_model
from verl_patches.memory.offload import Optimizer, Params
from verl_patches.memory.host_backed import places_of_optimizer, single_optimizers

def rollout_with_sync_mode(original: Callable) -> Callable:
    """Provider for _build_rollout: tell the sharding manager both layouts and what `recipe` says of the sync."""

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        rollout, manager = original(self, *args, **kwargs)
        recipe = self.config.get("recipe")
        manager.weight_sync_enabled = recipe is None or recipe.weight_sync.enabled
        manager.reshard_settings = None if recipe is None else _reshard_settings(self.config, recipe)
        return rollout, manager

    return build


def _reshard_settings(section: Any, recipe: Any) -> Settings:
    world = torch.distributed.get_world_size()
    return Settings(
        train_layout_in(section, recipe, world), rollout_layout_in(section, recipe, world), recipe.line,
        recipe.reshard.bucket_bytes, recipe.reshard.verify,
    )  # fmt: skip


@register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
def prove_patches(self: Any) -> dict[str, Any]:
    """This worker's proof: digest of intent, every row's state, and `error`, why verify refused (None: all active).

    Not blocking: the controller gets one reference a worker and can tell which one has no proof.
    """
    found, error = engine.current(), None
    try:
        found.verify("worker")
    except engine.PatchError as refused:
        error = str(refused)
    where = f"pid {os.getpid()} on {socket.gethostname()}"
    return {"rank": torch.distributed.get_rank(), "where": where, "digest": found.digest(),
            "intent": found.intent(), "status": found.status(), "error": error}


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_phase_seconds(self: Any) -> dict[str, float]:
    """{phase: seconds} of this worker since the last call."""
    return counters.take_seconds()


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_sync_reports(self: Any) -> list[dict[str, Any]]:
    """What each weight sync of this worker did since the last call (reshard/in_loop.py); empty on verl's own path."""
    resharder = getattr(getattr(self, "sharding_manager", None), "resharder", None)
    return resharder.take_reports() if resharder else []


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_log_prob_moments(self: Any) -> dict[str, dict[str, float]] | None:
    """Moments of both sides' log-probs in this worker's last update (old_log_prob.py); None where others have them."""
    return self.__dict__.pop("log_prob_moments", None)


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_checked(self: Any) -> dict[str, Any] | None:
    """What this replica sampled for the truth check (rollout/log_probs.py), from its first rank; None from others."""
    first = torch.distributed.get_rank() % self.config.rollout.tensor_model_parallel_size == 0
    checked = self.rollout.__dict__.pop("checked")
    return checked if first else None


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_offload(self: Any) -> list[dict[str, Any]]:
    """What was moved between host and device since the last call (memory/moves.py); empty on verl's own path."""
    return counters.take_moves()


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_starts(self: Any) -> list[tuple[str, float]]:
    """When this process started what the trainer asked of all workers, since the last call (comm/starts.py)."""
    return dispatch.take()


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
            conductor = scheduler.current() or _new_conductor(self, recipe)
            if self._is_actor:
                conductor.add(movers_of(self.actor_module, self.actor_optimizer))
            if self._is_ref:
                conductor.add(movers_of_reference(self.ref_module))
        return result

    return build


def _new_conductor(worker: Any, recipe: Any) -> scheduler.Conductor:
    device = None if recipe.platform == "cpu" else torch.get_device_module(recipe.platform)
    order, stays = _order_of(worker, recipe)
    switches = _switches(worker, recipe)
    trim = scheduler.trim_of(device, in_pool=switches["own_life"] and not switches["graphs"])
    scheduler.keep(scheduler.Conductor(order, trim, stays))
    return scheduler.current()


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
        for tag, tensors in (("weights", lambda: sleep_mode.all_weights(model).values()),
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
                scheduler.begin(phase, functools.partial(_wake, wake_up, self, tag))

    return call


def _wake(wake_up: Callable, engine: Any, tag: str) -> None:
    wake_up(engine, [tag])
    _ASLEEP.discard(tag)


def sleep(original: Callable) -> Callable:
    """Row provider for vLLM's LLM.sleep: the phase sleep begins."""

    @functools.wraps(original)
    def call(self: Any, level: int = 1) -> None:
        ledgers.look()
        scheduler.begin("sleep", functools.partial(_sleep, original, self, level))

    return call


def _sleep(original: Callable, engine: Any, level: int) -> None:
    original(engine, level)
    if measure.has_sleep_mode(engine):
        _ASLEEP.update(_TAGS)


def generate(original: Callable) -> Callable:
    """Row provider for vLLM's LLM.generate: the phase rollout begins, and ends when vLLM sleeps."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.begin("rollout")
        result = original(self, *args, **kwargs)
        ledgers.look()
        return result

    return call


def update(original: Callable) -> Callable:
    """Row provider for MegatronPPOActor.update_policy: the whole phase update."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.begin("update")
        result = original(self, *args, **kwargs)
        scheduler.end()  # not after an error: whatever phase begins next leaves this one
        return result

    return call


def log_prob(original: Callable) -> Callable:
    """Row provider for MegatronPPOActor.compute_log_prob, which actor and reference share: old_log_prob or ref."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.begin("ref" if self.actor_optimizer is None else "old_log_prob")
        result = original(self, *args, **kwargs)
        scheduler.end()
        return result

    return call


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_memory(self: Any) -> dict[str, Any] | None:
    """What this worker's ledger saw since the last call; None where none is kept."""
    ledger = ledgers.current()
    return {"rank": ledger.rank, **ledger.take()} if ledger else None


def at_save(save_checkpoint: Callable) -> Callable:
    """Row provider for ActorRolloutRefWorker.save_checkpoint, which reads."""
    return _all_there(save_checkpoint, writes=False)


def at_load(load_checkpoint: Callable) -> Callable:
    """Row provider for ActorRolloutRefWorker.load_checkpoint, which writes weights and replaces states."""
    return _all_there(load_checkpoint, writes=True)


def _all_there(original: Callable, writes: bool) -> Callable:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_actor:
            return original(self, *args, **kwargs)
        optimizers = [places_of_optimizer(one) for one in single_optimizers(self.actor_optimizer)]
        # without a conductor verl's own calls bring the weights, and take them away
        models = list(map(places_of_model, self.actor_module)) if scheduler.moved_here(self.actor_module) else []
        away = [Params(self.actor_module)] * any(each.away for each in models)
        away += [Optimizer(self.actor_optimizer)] * any(each.away for each in optimizers)
        for mover in away:
            mover.load()
        try:
            return original(self, *args, **kwargs)
        finally:
            for each in models:
                each.written = each.written or writes
            for mover in away:
                mover.offload()
            if writes and _is_to_be_away(self.actor_optimizer):
                Optimizer(self.actor_optimizer).offload()  # states that there were none of before

    return call


def _is_to_be_away(optimizer: Any) -> bool:
    """Whether its states belong on the host now; without a conductor verl's own call takes them there."""
    if any(places_of_optimizer(one).swapped for one in single_optimizers(optimizer)):
        return True
    return scheduler.moved_here(optimizer) and not scheduler.current().has("optimizer")
