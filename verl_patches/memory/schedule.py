"""Memory schedule of one GRPO step: which memory groups are on the device in each phase, and how they move. No torch.

A phase makes its `enter` moves before its work and its `leave` moves after it. A group that a phase does not name is
not moved. The moves, which have no effect on a group that is already there (load, alloc) or gone (offload, free):
    load G       allocate device memory for group G and fill it from the host
    alloc G      allocate device memory for group G; its contents are made on the device
    offload G    copy group G to the host and free its device memory
    free G       free the device memory of G without a copy
    empty_cache  the allocator returns its cached blocks to the device
scheduler.py executes `SCHEDULE`. With row memory.order off verl's own workers move memory (`VERL`), which is here for
the memory plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError

MEMORY_GROUPS = {
    "actor_params": "parameters of the actor: Megatron's param buffers",
    "grads": "its main gradients: Megatron's grad buffers",
    "optimizer": "fp32 main parameters and Adam's moments of this rank's share, all at once",
    "swap_window": "the piece of the optimizer that is on the device during a swapped step",
    "ref_params": "parameters of the reference model",
    "rollout_weights": "parameters of vLLM's model, and the projections that it derives from them where it copies",
    "kv_cache": "vLLM's blocks",
    "tensor_cache": "what one stage made for the next, on the device until the update has taken it",
    "reshard_buffers": "wire buffers of a weight sync; on verl's own path the tensors it gathers at once",
}
LOADS, RELEASES = ("load", "alloc"), ("offload", "free")


class Move(NamedTuple):
    """One move; `group` is empty for empty_cache."""

    verb: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.group}".strip()


@dataclass(frozen=True)
class Phase:
    """One row: the moves before and after the phase's work."""

    name: str
    enter: tuple[Move, ...] = ()
    leave: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The phases of a step. A step begins with no group on the device but those that never move.

    `complete`: the schedule from which this one was made by leaving out phases. Such a phase may still run in some
    steps (the pass of the truth check); the groups that it loads are freed when it ends.
    """

    name: str
    phases: tuple[Phase, ...]
    complete: Schedule | None = None

    def phase(self, name: str) -> Phase:
        """The phase of that name, also one that was left out; ConfigError for an unknown name."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        if self.complete is not None:
            return self.complete.phase(name)
        names = ", ".join(phase.name for phase in self.phases)
        raise ConfigError(f"schedule {self.name!r} has no phase {name!r}; it has {names}")

    def without(self, name: str) -> Schedule:
        """The schedule of runs that leave out a phase: old_log_prob with recipe.train.skip_old_log_prob."""
        phases = tuple(phase for phase in self.phases if phase is not self.phase(name))
        return Schedule(f"{self.name}, without {name}", phases, complete=self)

    def releases(self, group: str, phase: str) -> bool:
        """Whether `phase` offloads or frees `group`, before or after its work."""
        row = self.phase(phase)
        return any(move.group == group and move.verb in RELEASES for move in (*row.enter, *row.leave))

    def released_by(self, group: str, phase: str) -> str | None:
        """The last release of `group` before the work of `phase`, "after update (offload)"; None: it is never released.

        The step before counts too.
        """
        if self.complete is not None and self.phase(phase) not in self.phases:
            return self.complete.released_by(group, phase)
        moments = list(_moments(self))
        last = max(i for i, (row, where, _) in enumerate(moments) if row.name == phase and where != "leave")
        for row, where, move in reversed([*moments[last + 1 :], *moments[: last + 1]]):
            if move.group == group and move.verb in RELEASES:
                return f"{'at the start of' if where == 'enter' else 'after'} {row.name} ({move.verb})"
        return None


def _moments(schedule: Schedule) -> Iterator[tuple[Phase, str, Move]]:
    """(phase, enter | work | leave, move) in order; the work is a moment without a move."""
    for phase in schedule.phases:
        yield from ((phase, "enter", move) for move in phase.enter)
        yield phase, "work", Move("work")
        yield from ((phase, "leave", move) for move in phase.leave)


def _moves(text: str) -> tuple[Move, ...]:
    return tuple(Move(*words.split()) for words in text.split(", ") if words)


def make_schedule(name: str, *rows: tuple[str, str, str]) -> Schedule:
    """A schedule of rows (phase, enter, leave), moves separated by ", ". ConfigError for an unknown move or group."""
    schedule = Schedule(name, tuple(Phase(phase, _moves(enter), _moves(leave)) for phase, enter, leave in rows))
    for phase, _, move in _moments(schedule):
        known = not move.group if move.verb in ("empty_cache", "work") else move.group in MEMORY_GROUPS
        if move.verb not in (*LOADS, *RELEASES, "empty_cache", "work") or not known:
            raise ConfigError(f"schedule {name!r}, phase {phase.name}: {move!s} is no move; see memory/schedule.py")
    return schedule


# Training weights stay from the update to the weight sync. Rollout weights are allocated before the KV cache, which is
# allocated last and freed first. empty_cache twice a step: the KV cache takes what is left, and training follows it.
# Phases that run on the controller (reward, advantage) have no moves.
SCHEDULE = make_schedule(
    "ours",
    # phase, moves before its work, moves after it
    ("reshard", "load actor_params, alloc rollout_weights, alloc reshard_buffers",
     "free reshard_buffers, offload actor_params"),
    ("wake_kv", "empty_cache, alloc kv_cache", ""),
    ("rollout", "", "alloc tensor_cache"),
    ("sleep", "free kv_cache, free rollout_weights, empty_cache", ""),
    ("reward", "", ""),
    ("old_log_prob", "load actor_params", ""),
    ("ref", "load ref_params", "free ref_params"),
    ("advantage", "", ""),
    ("update", "free tensor_cache, load actor_params, alloc grads, load optimizer, alloc swap_window",
     "free swap_window, offload optimizer, free grads"),
)  # fmt: skip


class Moment(NamedTuple):
    """Memory of one phase: groups on the device during its work, highest sum and its groups, and copied bytes.

    `moves`: those that have an effect, and empty_cache.
    """

    phase: str
    resident: frozenset[str]
    peak_bytes: int
    at_peak: frozenset[str]
    to_device_bytes: int
    to_host_bytes: int
    empty_cache_calls: int
    moves: tuple[Move, ...]


def simulate(schedule: Schedule, sizes: Mapping[str, int], stays: Collection[str] = ()) -> dict[str, Moment]:
    """{phase: Moment} of every step but the first; peaks are the highest of all steps.

    `sizes`: bytes of each memory group on this rank; 0 or missing for a group that the rank does not have. `stays`:
    groups that never leave the device. ConfigError if a phase of the first step holds other groups than later.
    """
    sizes = {group: sizes.get(group, 0) for group in MEMORY_GROUPS}
    now = {group for group in stays if sizes[group]}
    first = _step(schedule, sizes, now, frozenset(stays))
    later = _step(schedule, sizes, now, frozenset(stays))
    for name, moment in later.items():
        before = first[name]
        if before.resident != moment.resident:
            groups = [", ".join(sorted(m.resident)) or "nothing" for m in (before, moment)]
            raise ConfigError(
                f"schedule {schedule.name!r}: {name} holds {groups[0]} in the first step and {groups[1]} later; "
                "name every group that changes at its entry"
            )
        highest = max(moment, before, key=lambda each: each.peak_bytes)
        later[name] = moment._replace(peak_bytes=highest.peak_bytes, at_peak=highest.at_peak)
    return later


def _step(schedule: Schedule, sizes: Mapping[str, int], now: set[str], stays: frozenset[str]) -> dict[str, Moment]:
    """One step; `now`, the groups on the device, is changed in place."""
    moments: dict[str, Moment] = {}
    for phase, where, move in _moments(schedule):
        moment = moments.setdefault(phase.name, Moment(phase.name, frozenset(), 0, frozenset(), 0, 0, 0, ()))
        copied, does = 0, move.verb == "empty_cache"
        if move.group and move.group not in stays and sizes[move.group]:
            loads = move.verb in LOADS
            does = loads != (move.group in now)
            copied = sizes[move.group] if does else 0
            if loads:
                now.add(move.group)
            else:
                now.discard(move.group)
        total = sum(sizes[group] for group in now)
        if total > moment.peak_bytes:
            moment = moment._replace(peak_bytes=total, at_peak=frozenset(now))
        if where == "work":
            moment = moment._replace(resident=frozenset(now))
        if move.verb == "load":
            moment = moment._replace(to_device_bytes=moment.to_device_bytes + copied)
        elif move.verb == "offload":
            moment = moment._replace(to_host_bytes=moment.to_host_bytes + copied)
        elif move.verb == "empty_cache":
            moment = moment._replace(empty_cache_calls=moment.empty_cache_calls + 1)
        moments[phase.name] = moment._replace(moves=(*moment.moves, move)) if does else moment
    return moments


def residency(schedule: Schedule, stays: Collection[str] = ()) -> dict[str, frozenset[str]]:
    """{phase: groups on the device during its work}, which the ledger expects. ConfigError as `simulate`."""
    left_out = {} if schedule.complete is None else residency(schedule.complete, stays)
    moments = simulate(schedule, dict.fromkeys(MEMORY_GROUPS, 1), stays)
    return left_out | {name: moment.resident for name, moment in moments.items()}


# After the weight sync both of verl's schedules are the same: verl/workers/megatron_workers.py, its compute_log_prob,
# compute_ref_log_prob and update_actor; verl/utils/megatron_utils.py empties the cache in each of its four functions.
_VERL_TRAINING = (
    ("rollout", "", ""),
    # megatron_vllm.py, __exit__: sleep(level=1) copies the weights to the host; the worker empties the cache once more
    ("sleep", "offload rollout_weights, free kv_cache, empty_cache, empty_cache", ""),
    ("reward", "", ""),
    ("old_log_prob", "load actor_params, empty_cache", "offload actor_params, empty_cache, empty_cache"),
    ("ref", "load ref_params, empty_cache", "offload ref_params, empty_cache, empty_cache"),
    ("advantage", "", ""),
    ("update", "load actor_params, alloc grads, empty_cache, load optimizer, empty_cache, alloc swap_window",
     "free swap_window, offload actor_params, free grads, empty_cache, offload optimizer, empty_cache, empty_cache"),
)  # fmt: skip
# megatron_workers.py:449 generate_sequences: loads gradients too, offloads both after the sync, then wakes the cache
_VERL_0_4_0 = make_schedule(
    "verl 0.4.0",
    ("reshard", "load actor_params, alloc grads, empty_cache, offload optimizer, empty_cache, load rollout_weights, "
     "alloc reshard_buffers", "free reshard_buffers, offload actor_params, free grads, empty_cache"),
    ("wake_kv", "alloc kv_cache", ""),
    *_VERL_TRAINING,
)  # fmt: skip
# megatron_workers.py:447: its sharding manager wakes the cache (megatron_vllm.py:334) before the worker offloads
_VERL_54C9B736 = make_schedule(
    "verl 54c9b736",
    ("reshard", "load actor_params, alloc grads, empty_cache, load rollout_weights, alloc reshard_buffers",
     "free reshard_buffers"),
    ("wake_kv", "alloc kv_cache", "offload actor_params, free grads, empty_cache, offload optimizer, empty_cache"),
    *_VERL_TRAINING,
)  # fmt: skip
VERL = {"pypi": _VERL_0_4_0, "a3": _VERL_54C9B736}


def in_sleep_mode(schedule: Schedule, copied: bool = True) -> Schedule:
    """`schedule`, ours, where vLLM's sleep mode moves the rollout weights, in memory outside torch's pool.

    `copied`: to the host and back; else weights that a weight sync writes are not copied (memory/sleep_mode.py).
    """
    load, release = ("load", "offload") if copied else ("alloc", "free")
    how = "with vLLM's sleep mode" if copied else "addresses kept by vLLM"
    enter, leave = f"empty_cache, {load} rollout_weights", f"{release} rollout_weights"
    return _with_moves(
        f"{schedule.name}, {how}", schedule, {"alloc rollout_weights": enter, "free rollout_weights": leave}
    )


def _with_moves(name: str, schedule: Schedule, changed: Mapping[str, str]) -> Schedule:
    def replaced(moves: tuple[Move, ...]) -> str:
        return ", ".join(changed.get(str(move), str(move)) for move in moves)

    return make_schedule(name, *((p.name, replaced(p.enter), replaced(p.leave)) for p in schedule.phases))


def switches_of(rows: Collection[str], *, vllm_sleep: bool, synced: bool) -> dict[str, bool]:
    """{own_sleep_mode, vllm_sleep} for `schedule_followed`, by the ids of the rows that are on.

    `vllm_sleep`: see `sleeps_by_vllm`; weights that no sync writes then keep vLLM's copy. `synced`: see `staying`.
    """
    return {"own_sleep_mode": "memory.sleep_mode" in rows and (synced or not vllm_sleep), "vllm_sleep": vllm_sleep}


def sleeps_by_vllm(rollout: Any, recipe: Any) -> bool:
    """Whether the engine of verl's `rollout` section uses vLLM's sleep mode, with which weights keep their addresses.

    Captured graphs hold addresses, unless recipe.rollout.ascend.vllm_sleep_mode is false.
    """
    return not rollout.enforce_eager and recipe.rollout.ascend.vllm_sleep_mode


def direct_sync(rows: Collection[str]) -> bool:
    """Whether the resharder writes the rollout weights; it proves that it writes all, verl's own path does not."""
    return "reshard.direct" in rows


def schedule_followed(*, skip_old_log_prob: bool, own_sleep_mode: bool = False, vllm_sleep: bool = False) -> Schedule:
    """The schedule that a run with row memory.order follows.

    `own_sleep_mode`: rollout weights are not copied to the host; with `vllm_sleep` vLLM's sleep mode still moves them.
    """
    schedule = SCHEDULE if own_sleep_mode and not vllm_sleep else in_sleep_mode(SCHEDULE, copied=not own_sleep_mode)
    return schedule.without("old_log_prob") if skip_old_log_prob else schedule


def staying(
    *,
    param_offload: bool,
    optimizer_offload: bool,
    ref_offload: bool,
    one_memory: bool = False,
    own_sleep_mode: bool = False,
    synced: bool = True,
) -> frozenset[str]:
    """Memory groups that a run never moves: those of verl's three offload switches that are off, and some others.

    verl frees gradients with the parameters and never reads its grad_offload. `one_memory`: host and device share
    their memory (a CPU), where vLLM's sleep does not move the rollout weights. With `own_sleep_mode` they are moved
    everywhere unless not `synced`: no weight sync writes new ones (recipe.weight_sync.enabled), or none that proves to
    write all (`direct_sync`).
    """
    stays = set() if param_offload else {"actor_params", "grads"}
    if not optimizer_offload:
        stays.add("optimizer")
    if not ref_offload:
        stays.add("ref_params")
    if not synced if own_sleep_mode else one_memory:
        stays.add("rollout_weights")
    return frozenset(stays)
