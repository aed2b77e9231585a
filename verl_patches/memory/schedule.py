"""The memory schedule of one GRPO step: which memory groups are resident in each phase, and how they move. No torch.

A phase's `enter` moves are made before its work, its `leave` moves right after it. Moves:
    load G       device memory for group G, filled from the host      (nothing to do if G is resident)
    alloc G      device memory for group G, contents made there       (nothing to do if G is resident)
    offload G    bytes of G to the host, its device memory freed      (nothing to do if G is not resident)
    free G       device memory of G freed, nothing copied             (nothing to do if G is not resident)
    empty_cache  the allocator returns its cached blocks to the device
A group that a phase does not name stays as it is. scheduler.py executes the table; without row memory.order a run
follows the schedule of verl's own workers, which stands here too, for the plan and the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from verl_patches.errors import ConfigError

MEMORY_GROUPS = {
    "actor_params": "parameters of the actor: Megatron's param buffers",
    "grads": "its main gradients: Megatron's grad buffers",
    "optimizer": "fp32 main parameters and Adam's moments of this rank's share, all at once",
    "swap_window": "the piece of the optimizer that is on the device during a swapped step",
    "ref_params": "parameters of the reference model",
    "rollout_weights": "parameters of vLLM's model, and the projections that it derives from them where it copies",
    "kv_cache": "vLLM's blocks",
    "tensor_cache": "what one stage made for the next, kept on the device until the update has taken it",
    "reshard_buffers": "wire buffers of a weight sync; on verl's own path the tensors it gathers at once",
}
LOADS, RELEASES = ("load", "alloc"), ("offload", "free")


class Move(NamedTuple):
    """One word of the table; `group` is empty for empty_cache."""

    verb: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.group}".strip()


@dataclass(frozen=True)
class Phase:
    """One row: the moves before and after its work."""

    name: str
    enter: tuple[Move, ...] = ()
    leave: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A whole step, which begins with nothing on the device but what never moves; `phase(name)` finds a row.

    `whole`: the schedule that this one leaves phases out of. They may still run in some steps (the pass of the truth
    check); what they load is freed when they end.
    """

    name: str
    phases: tuple[Phase, ...]
    whole: Schedule | None = None

    def phase(self, name: str) -> Phase:
        """A row of the table, or of the whole one; ConfigError for a name that is in neither."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        if self.whole is not None:
            return self.whole.phase(name)
        names = ", ".join(phase.name for phase in self.phases)
        raise ConfigError(f"schedule {self.name!r} has no phase {name!r}; it has {names}")

    def without(self, phase: str) -> Schedule:
        """The schedule of runs without `phase`: old_log_prob with recipe.train.skip_old_log_prob."""
        kept = tuple(p for p in self.phases if p is not self.phase(phase))
        return Schedule(f"{self.name}, without {phase}", kept, whole=self)

    def releases(self, group: str, phase: str) -> bool:
        """Whether `group` is offloaded or freed before the work of `phase`, or after it."""
        found = self.phase(phase)
        return any(move.group == group and move.verb in RELEASES for move in (*found.enter, *found.leave))

    def released_by(self, group: str, phase: str) -> str | None:
        """Where `group` was last to go before the work of `phase`, "at the end of update (offload)"; None: never."""
        if self.whole is not None and self.phase(phase) not in self.phases:
            return self.whole.released_by(group, phase)
        moments = list(_moments(self))
        last = max(i for i, (at, where, _) in enumerate(moments) if at.name == phase and where != "leave")
        for at, where, move in reversed([*moments[last + 1 :], *moments[: last + 1]]):
            if move.group == group and move.verb in RELEASES:
                return f"{'at the start of' if where == 'enter' else 'after'} {at.name} ({move.verb})"
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
    """What a phase holds and costs: `resident` while it works, the highest sum of it, bytes that its moves copy.

    `moves`: those that have an effect, empty_cache among them.
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
    """{phase: Moment} of a step in the long run; peaks are the higher of the first step's and a later one's.

    `sizes`: bytes of each memory group on this rank, 0 or left out for one that it has not. `stays`: groups that never
    leave the device, whatever the table says. ConfigError for a schedule whose phases do not always hold the same.
    """
    sizes = {group: sizes.get(group, 0) for group in MEMORY_GROUPS}
    now = {group for group in stays if sizes[group]}
    first = _step(schedule, sizes, now, frozenset(stays))
    later = _step(schedule, sizes, now, frozenset(stays))
    found = {}
    for name, moment in later.items():
        before = first[name]
        if before.resident != moment.resident:
            raise ConfigError(
                f"schedule {schedule.name!r}: {name} holds {_names(before.resident)} in the first step and "
                f"{_names(moment.resident)} later; name every group that changes at its entry"
            )
        highest = max(moment, before, key=lambda each: each.peak_bytes)
        found[name] = moment._replace(peak_bytes=highest.peak_bytes, at_peak=highest.at_peak)
    return found


def _step(schedule: Schedule, sizes: Mapping[str, int], now: set[str], stays: frozenset[str]) -> dict[str, Moment]:
    """One step; `now`, the resident groups, is changed in place."""
    found: dict[str, Moment] = {}
    for phase, where, move in _moments(schedule):
        moment = found.setdefault(phase.name, Moment(phase.name, frozenset(), 0, frozenset(), 0, 0, 0, ()))
        copied, does = 0, move.verb == "empty_cache"
        if move.group and move.group not in stays and sizes[move.group]:
            loads = move.verb in LOADS
            does = loads != (move.group in now)
            copied = sizes[move.group] * (does and move.verb in ("load", "offload"))
            if loads:
                now.add(move.group)
            else:
                now.discard(move.group)
        total = sum(sizes[group] for group in now)
        if total > moment.peak_bytes:
            moment = moment._replace(peak_bytes=total, at_peak=frozenset(now))
        if where == "work":
            moment = moment._replace(resident=frozenset(now))
        found[phase.name] = moment._replace(
            to_device_bytes=moment.to_device_bytes + copied * (move.verb == "load"),
            to_host_bytes=moment.to_host_bytes + copied * (move.verb == "offload"),
            empty_cache_calls=moment.empty_cache_calls + (move.verb == "empty_cache"),
            moves=moment.moves + (move,) * does,
        )
    return found


def _names(groups: Collection[str]) -> str:
    return ", ".join(sorted(groups)) or "nothing"


def residency(schedule: Schedule, stays: Collection[str] = ()) -> dict[str, frozenset[str]]:
    """{phase: groups on the device while it works}: what the ledger expects. ConfigError as `simulate`."""
    of_whole = {} if schedule.whole is None else residency(schedule.whole, stays)
    moments = simulate(schedule, dict.fromkeys(MEMORY_GROUPS, 1), stays)
    return of_whole | {name: moment.resident for name, moment in moments.items()}


def moves_of_a_step(schedule: Schedule, stays: Collection[str], groups: Collection[str]) -> list[str]:
    """The moves of a step in the long run, of `groups` and of the allocator: "load actor_params" and the like."""
    moments = simulate(schedule, dict.fromkeys(MEMORY_GROUPS, 1), stays).values()
    return [str(move) for moment in moments for move in moment.moves if not move.group or move.group in groups]


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
VERL_0_4_0 = make_schedule(
    "verl 0.4.0",
    ("reshard", "load actor_params, alloc grads, empty_cache, offload optimizer, empty_cache, load rollout_weights, "
     "alloc reshard_buffers", "free reshard_buffers, offload actor_params, free grads, empty_cache"),
    ("wake_kv", "alloc kv_cache", ""),
    *_VERL_TRAINING,
)  # fmt: skip
# megatron_workers.py:447: its sharding manager wakes the cache (megatron_vllm.py:334) before the worker offloads
VERL_54C9B736 = make_schedule(
    "verl 54c9b736",
    ("reshard", "load actor_params, alloc grads, empty_cache, load rollout_weights, alloc reshard_buffers",
     "free reshard_buffers"),
    ("wake_kv", "alloc kv_cache", "offload actor_params, free grads, empty_cache, offload optimizer, empty_cache"),
    *_VERL_TRAINING,
)  # fmt: skip
VERL = {"pypi": VERL_0_4_0, "a3": VERL_54C9B736}


def in_sleep_mode(schedule: Schedule, copied: bool = True) -> Schedule:
    """`schedule`, ours, where vLLM's sleep mode moves the rollout weights, in memory past the pool.

    `copied`: to the host and back; else what a weight sync writes is not copied (memory/sleep_mode.py).
    """
    load, release = ("load", "offload") if copied else ("alloc", "free")
    changed = {
        Move("alloc", "rollout_weights"): (Move("empty_cache"), Move(load, "rollout_weights")),
        Move("free", "rollout_weights"): (Move(release, "rollout_weights"),),
    }
    how = "with vLLM's sleep mode" if copied else "addresses kept by vLLM"
    return _exchanged(f"{schedule.name}, {how}", schedule, changed)


def without_weight_copies(schedule: Schedule) -> Schedule:
    """`schedule`, verl's, where rollout weights are freed and allocated without a copy."""
    changed = {
        Move("load", "rollout_weights"): (Move("alloc", "rollout_weights"),),
        Move("offload", "rollout_weights"): (Move("free", "rollout_weights"),),
    }
    return _exchanged(f"{schedule.name}, rollout weights not copied", schedule, changed)


def _exchanged(name: str, schedule: Schedule, changed: Mapping[Move, tuple[Move, ...]]) -> Schedule:
    def each(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(new for move in moves for new in changed.get(move, (move,)))

    return Schedule(name, tuple(Phase(p.name, each(p.enter), each(p.leave)) for p in schedule.phases))


def switches_of(rows: Collection[str], *, enforce_eager: bool, synced: bool) -> dict[str, bool]:
    """{our_schedule, own_sleep_mode, graphs} for `schedule_followed`, by the ids of the rows that are on.

    `synced`: see `staying`; captured graphs keep weights that no sync brings by vLLM's copy.
    """
    return {
        "our_schedule": "memory.order" in rows,
        "own_sleep_mode": "memory.sleep_mode" in rows and (enforce_eager or synced),
        "graphs": not enforce_eager,
    }


def direct_sync(rows: Collection[str]) -> bool:
    """Whether the resharder writes rollout weights, which proves that it writes every one; verl's own path does not."""
    return "reshard.direct" in rows


def schedule_followed(
    line: str, *, skip_old_log_prob: bool, our_schedule: bool = True, own_sleep_mode: bool = False, graphs: bool = False
) -> Schedule:
    """The schedule that a run follows, by the rows that are on: ours, or that of verl's own worker.

    `our_schedule`: row memory.order. `own_sleep_mode`: rollout weights are not copied to the host; with `graphs`
    vLLM's sleep mode still moves them.
    """
    if our_schedule:
        schedule = SCHEDULE if own_sleep_mode and not graphs else in_sleep_mode(SCHEDULE, copied=not own_sleep_mode)
    else:
        schedule = without_weight_copies(VERL[line]) if own_sleep_mode else VERL[line]
    return schedule.without("old_log_prob") if skip_old_log_prob else schedule


def staying(
    *,
    param_offload: bool,
    optimizer_offload: bool,
    ref_offload: bool,
    one_memory: bool = False,
    our_schedule: bool = True,
    own_sleep_mode: bool = False,
    synced: bool = True,
) -> frozenset[str]:
    """Memory groups that a run never moves: those of verl's three offload switches that are off.

    verl frees gradients with the parameters, its grad_offload is read nowhere. `one_memory`: host and device are the
    same (a CPU), where verl's moves from device to device move nothing; buffers that it resizes go there too, and with
    `our_schedule` (row memory.order) everything does. There vLLM's sleep leaves the rollout weights;
    with `own_sleep_mode` they go everywhere, but where not `synced`: no weight sync brings new ones
    (recipe.weight_sync.enabled), or none that provably writes all (`direct_sync`).
    """
    stays = set() if param_offload else {"actor_params", "grads"}
    unmoved = one_memory and not our_schedule
    if not optimizer_offload or unmoved:
        stays.add("optimizer")
    if not ref_offload or unmoved:
        stays.add("ref_params")
    if not synced if own_sleep_mode else one_memory:
        stays.add("rollout_weights")
    return frozenset(stays)
