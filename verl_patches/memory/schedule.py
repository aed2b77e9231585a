"""Define which memory groups are on the device in each phase of a GRPO step, and which moves bring them there.

A phase makes its `enter` moves before its work and its `leave` moves after it. A group that a phase does not name is
not moved. load and alloc have no effect on a group that is on the device already, offload and free on one that is not:
    load G       allocate device memory for group G and fill it from the host
    alloc G      allocate device memory for group G; its contents are made on the device
    offload G    copy group G to the host and free its device memory
    free G       free the device memory of G without a copy
    empty_cache  the allocator returns its cached blocks to the device
scheduler.py executes `SCHEDULE`. With row memory.order off verl's own workers move memory; `VERL_SCHEDULES` describes
their moves for the memory plan. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from verl_patches.spec import RunSpec

MEMORY_GROUPS = {
    "actor_params": "parameters of the actor: Megatron's param buffers",
    "grads": "its main gradients: Megatron's grad buffers",
    "optimizer": "fp32 main parameters and Adam's moments of this rank's share, all at once",
    "swap_window": "with recipe.train.swap_optimizer the piece of the optimizer that is on the device",
    "ref_params": "parameters of the reference model",
    "rollout_weights": "parameters of vLLM's model, and the projections that it derives from them where it copies",
    "kv_cache": "vLLM's blocks",
    "tensor_cache": "what one stage made for the next, on the device until the update has taken it",
    "reshard_buffers": "wire buffers of a weight sync; on verl's own path the tensors it gathers at once",
    "critic_params": "parameters of the critic",
    "critic_grads": "its main gradients",
    "critic_optimizer": "fp32 main parameters and Adam's moments of the critic, of this rank's share, all at once",
    "critic_window": "with recipe.train.swap_optimizer the piece of the critic's optimizer that is on the device",
    "reward_params": "parameters of the reward model that scores; each has a host copy of its own",
}
ROLLOUT_PHASES = ("reshard", "wake_kv", "rollout", "sleep")  # phases of runs that sample responses


class TrainedGroups(NamedTuple):
    """Name the memory groups of one model that is trained."""

    params: str
    grads: str
    optimizer: str
    window: str


ACTOR = TrainedGroups("actor_params", "grads", "optimizer", "swap_window")
CRITIC = TrainedGroups("critic_params", "critic_grads", "critic_optimizer", "critic_window")
LOAD_VERBS, RELEASE_VERBS = ("load", "alloc"), ("offload", "free")


class Move(NamedTuple):
    """Describe one move of a memory group; `group` is empty for empty_cache."""

    verb: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.group}".strip()


@dataclass(frozen=True)
class Phase:
    """Describe a phase by the moves before and after its work; a `rare` phase is in some steps only."""

    name: str
    enter: tuple[Move, ...] = ()
    leave: tuple[Move, ...] = ()
    rare: bool = False


@dataclass(frozen=True)
class Schedule:
    """List the phases of a step, which begins with no group on the device except those that never move."""

    name: str
    phases: tuple[Phase, ...]

    def phase(self, name: str) -> Phase:
        """Return the phase of that name; an unknown name raises KeyError."""
        return {phase.name: phase for phase in self.phases}[name]

    def with_rare_phase(self, name: str) -> Schedule:
        """Return the schedule with a phase made rare, as old_log_prob is with recipe.train.skip_old_log_prob.

        Some steps may still have the phase, for the check of vLLM's log-probs (step/log_probs/logprob_check.py). It
        frees the groups that it loads when it ends, so that later phases are the same in steps without it.
        """
        row = self.phase(name)
        frees = (Move("free", move.group) for move in row.enter if move.verb in LOAD_VERBS)
        rare = replace(row, leave=(*row.leave, *frees), rare=True)
        phases = tuple(rare if phase is row else phase for phase in self.phases)
        return Schedule(f"{self.name}, without {name}", phases)

    def for_run(self, run: RunSpec, critic: bool) -> Schedule:
        """Return the schedule without the phases that a run leaves out, with those of a critic and of reward models."""
        schedule = self.with_rare_phase("old_log_prob") if run.recipe.train.skip_old_log_prob else self
        if critic:
            schedule = schedule.with_critic()
        if run.reward_models:
            schedule = schedule.with_reward_models()
        if run.samples:
            return schedule
        phases = tuple(row for row in schedule.phases if row.name not in ROLLOUT_PHASES)
        return Schedule(f"{schedule.name}, no rollout", phases)

    def with_critic(self) -> Schedule:
        """Return the schedule with a critic, which computes values after the reference and updates before the actor."""
        rows = _VERL_CRITIC_PHASES if self.name.startswith("verl") else _CRITIC_PHASES
        values, update = (Phase(name, _parse_moves(enter), _parse_moves(leave)) for name, enter, leave in rows)
        phases = []
        for row in self.phases:
            if row.name == "update":
                phases.append(update)
            phases.append(row)
            if row.name == "ref":
                phases.append(values)
        return Schedule(f"{self.name}, with a critic", tuple(phases))

    def with_reward_models(self) -> Schedule:
        """Return the schedule with reward models, which has phase rm_scores before the reward, once for each model."""
        leave = "offload reward_params, empty_cache" if self.name.startswith("verl") else "free reward_params"
        scores = Phase("rm_scores", _parse_moves("load reward_params"), _parse_moves(leave))
        at = [row.name for row in self.phases].index("reward")
        return Schedule(f"{self.name}, with reward models", (*self.phases[:at], scores, *self.phases[at:]))

    def releases(self, group: str, phase: str) -> bool:
        """Return whether `phase` offloads or frees `group`, before or after its work."""
        row = self.phase(phase)
        return any(move.group == group and move.verb in RELEASE_VERBS for move in (*row.enter, *row.leave))


def _parse_moves(text: str) -> tuple[Move, ...]:
    return tuple(Move(*words.split()) for words in text.split(", ") if words)


def make_schedule(name: str, *rows: tuple[str, str, str]) -> Schedule:
    """Return a schedule of rows (phase, enter, leave), whose moves are separated by ", "."""
    return Schedule(name, tuple(Phase(phase, _parse_moves(enter), _parse_moves(leave)) for phase, enter, leave in rows))


# Training weights stay from the update to the weight sync. Rollout weights are allocated before the KV cache, which is
# allocated last and freed first. empty_cache runs before the KV cache takes the memory that is left, and before
# training takes that of the KV cache. Phases that run on the controller (reward, advantage) have no moves.
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

# The actor's parameters, which old_log_prob has loaded, are freed so that the critic's update needs no more memory than
# the actor's.
_CRITIC_PHASES = (
    ("values", "free actor_params, load critic_params", ""),
    ("update_critic", "load critic_params, alloc critic_grads, load critic_optimizer, alloc critic_window",
     "free critic_window, offload critic_optimizer, free critic_grads, offload critic_params"),
)  # fmt: skip


@dataclass
class PhaseMemory:
    """Hold the memory of one phase: groups on the device during its work, peak and its groups, and copied bytes.

    `moves` has the moves that have an effect, and empty_cache.
    """

    resident: frozenset[str] = frozenset()
    peak_bytes: int = 0
    at_peak: frozenset[str] = frozenset()
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    empty_cache_calls: int = 0
    moves: list[Move] = field(default_factory=list)


def simulate(
    schedule: Schedule, sizes: Mapping[str, int], unmoved_groups: Collection[str] = (), rare: bool = False
) -> dict[str, PhaseMemory]:
    """Return {phase: PhaseMemory} of every step but the first; peaks are the highest of all steps.

    `sizes`: bytes of each memory group on this rank; 0 or missing for a group that the rank does not have.
    `unmoved_groups`: groups that never leave the device. `rare`: whether phases that only some steps have are included.
    Every phase must hold the same groups in the first step, which begins with `unmoved_groups` alone, as in later ones,
    so its `enter` moves must load or release each group that may differ before it.
    """
    phases = [phase for phase in schedule.phases if rare or not phase.rare]
    moving = {group: size for group, size in sizes.items() if size and group not in unmoved_groups}
    now = {group: size for group, size in sizes.items() if size and group in unmoved_groups}
    first, later = (_simulate_step(phases, moving, now) for _ in range(2))
    for name, moment in later.items():
        highest = max(moment, first[name], key=lambda each: each.peak_bytes)
        moment.peak_bytes, moment.at_peak = highest.peak_bytes, highest.at_peak
    return later


def _simulate_step(phases: Sequence[Phase], sizes: Mapping[str, int], now: dict[str, int]) -> dict[str, PhaseMemory]:
    """Simulate one step; `sizes` has the groups that move, `now` {group: bytes} on the device, changed in place."""
    moments = {phase.name: PhaseMemory() for phase in phases}
    for phase in phases:
        moment = moments[phase.name]
        for move in phase.enter:
            _apply_move(move, moment, sizes, now)
        moment.resident = frozenset(now)
        _note_peak(moment, now)
        for move in phase.leave:
            _apply_move(move, moment, sizes, now)
    return moments


def _apply_move(move: Move, moment: PhaseMemory, sizes: Mapping[str, int], now: dict[str, int]) -> None:
    size, loads = sizes.get(move.group, 0), move.verb in LOAD_VERBS
    does = size > 0 and loads != (move.group in now)
    if does and loads:
        now[move.group] = size
        moment.to_device_bytes += size if move.verb == "load" else 0
    elif does:
        del now[move.group]
        moment.to_host_bytes += size if move.verb == "offload" else 0
    if move.verb == "empty_cache":
        moment.empty_cache_calls += 1
    if does or move.verb == "empty_cache":
        moment.moves.append(move)
    _note_peak(moment, now)


def _note_peak(moment: PhaseMemory, now: Mapping[str, int]) -> None:
    total = sum(now.values())
    if total > moment.peak_bytes:
        moment.peak_bytes, moment.at_peak = total, frozenset(now)


def residency(schedule: Schedule, unmoved_groups: Collection[str] = ()) -> dict[str, frozenset[str]]:
    """Return {phase: groups on the device during its work}, which the ledger expects."""
    moments = simulate(schedule, dict.fromkeys(MEMORY_GROUPS, 1), unmoved_groups, rare=True)
    return {name: moment.resident for name, moment in moments.items()}


# Both versions of verl have these phases after the weight sync: compute_log_prob, compute_ref_log_prob and update_actor
# of verl/workers/megatron_workers.py; each of the four functions of verl/utils/megatron_utils.py empties the cache.
_VERL_TRAINING_PHASES = (
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
_VERL_CRITIC_PHASES = (
    ("values", "load critic_params, empty_cache", "empty_cache, offload critic_params, empty_cache"),
    ("update_critic", "load critic_params, alloc critic_grads, empty_cache, load critic_optimizer, empty_cache, "
     "alloc critic_window", "free critic_window, empty_cache, offload critic_params, free critic_grads, empty_cache, "
     "offload critic_optimizer, empty_cache"),
)  # fmt: skip
# verl.workers.megatron_workers.ActorRolloutRefWorker.generate_sequences loads gradients too, offloads both after the
# sync, then wakes the cache
_VERL_0_4_0 = make_schedule(
    "verl 0.4.0",
    ("reshard", "load actor_params, alloc grads, empty_cache, offload optimizer, empty_cache, load rollout_weights, "
     "alloc reshard_buffers", "free reshard_buffers, offload actor_params, free grads, empty_cache"),
    ("wake_kv", "alloc kv_cache", ""),
    *_VERL_TRAINING_PHASES,
)  # fmt: skip
# verl.workers.sharding_manager.megatron_vllm.MegatronVLLMShardingManager.__enter__ wakes the cache before the worker
# offloads
_VERL_54C9B736 = make_schedule(
    "verl 54c9b736",
    ("reshard", "load actor_params, alloc grads, empty_cache, load rollout_weights, alloc reshard_buffers",
     "free reshard_buffers"),
    ("wake_kv", "alloc kv_cache", "offload actor_params, free grads, empty_cache, offload optimizer, empty_cache"),
    *_VERL_TRAINING_PHASES,
)  # fmt: skip
VERL_SCHEDULES = {"pypi": _VERL_0_4_0, "a3": _VERL_54C9B736}


def vllm_sleep_schedule() -> Schedule:
    """Return our schedule where vLLM's sleep mode copies the rollout weights, in memory outside torch's pool."""
    changed = {
        Move("alloc", "rollout_weights"): (Move("empty_cache"), Move("load", "rollout_weights")),
        Move("free", "rollout_weights"): (Move("offload", "rollout_weights"),),
    }

    def replaced(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(each for move in moves for each in changed.get(move, (move,)))

    phases = tuple(Phase(row.name, replaced(row.enter), replaced(row.leave)) for row in SCHEDULE.phases)
    return Schedule(f"{SCHEDULE.name}, with vLLM's sleep mode", phases)


def groups_without_offload(megatron: Any, groups: TrainedGroups) -> set[str]:
    """Return the memory groups of a model that verl's offload switches in `megatron` leave on the device."""
    unmoved_groups = set() if megatron.param_offload else {groups.params, groups.grads}
    return unmoved_groups if megatron.optimizer_offload else {*unmoved_groups, groups.optimizer}


def schedule_for_run(
    run: RunSpec, section: Any, critic: Any = None, unified_memory: bool = False
) -> tuple[Schedule, frozenset[str]]:
    """Return (schedule, memory groups that are never moved) of a run with verl's `section` actor_rollout_ref.

    `critic`: verl's section of that name in a run with a critic. `unified_memory`: device and host are one memory (a
    CPU), where vLLM's sleep does not move the rollout weights. Without row memory.order the schedule is verl's own.

    Groups whose offload switch in verl is off stay on the device; verl frees gradients with the parameters and never
    reads its grad_offload. Row memory.sleep_mode frees rollout weights that a direct sync writes, and leaves others on
    the device; vLLM's sleep mode copies them.
    """
    synced = run.recipe.weight_sync.enabled and "reshard.direct" in run.rows  # verl's own may not write every weight
    dropped = "memory.sleep_mode" in run.rows
    if "memory.order" not in run.rows:
        schedule = VERL_SCHEDULES[run.line]
    else:
        schedule = SCHEDULE if dropped else vllm_sleep_schedule()
    unmoved_groups = groups_without_offload(section.actor.megatron, ACTOR)
    if critic is not None:
        unmoved_groups |= groups_without_offload(critic.megatron, CRITIC)
    if not section.ref.megatron.param_offload:
        unmoved_groups.add("ref_params")
    if run.samples and ((dropped and not synced) or (not dropped and unified_memory)):
        unmoved_groups.add("rollout_weights")
    return schedule.for_run(run, critic is not None), frozenset(unmoved_groups)
