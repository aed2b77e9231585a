"""Names of the phases and calls of one GRPO step, from which tables, reports and models derive theirs. No torch."""

from __future__ import annotations

from typing import NamedTuple


class StepPhase(NamedTuple):
    """One phase of a step.

    name: in its record (summary.json), metrics and columns; planned: in the memory schedule (memory/schedule.py), the
    step model and heartbeats; timer: verl's own around it, None where workers measure it; call: of the trainer, in
    which it lies, None for one that lies in several or in none; critic: of runs with a critic alone.
    """

    name: str
    planned: str
    timer: str | None
    call: str | None
    critic: bool = False


STEP_PHASES = (  # in the order of the step table
    StepPhase("rollout", "rollout", "gen", "generate_sequences"),
    StepPhase("reshard", "reshard", None, "generate_sequences"),
    StepPhase("offload", "offload", None, None),
    StepPhase("reward", "reward", "reward", "reward"),
    StepPhase("log_prob", "old_log_prob", "old_log_prob", "compute_log_prob"),
    StepPhase("ref", "ref", "ref", "compute_ref_log_prob"),
    StepPhase("values", "values", "values", "compute_values", critic=True),
    StepPhase("advantage", "advantage", "adv", None),
    StepPhase("update_critic", "update_critic", "update_critic", "update_critic", critic=True),
    StepPhase("update", "update", "update_actor", "update_actor"),
)
CALLS = {  # of the trainer, in their order in a step: what is shown while one runs; workers have no part in the reward
    "generate_sequences": "reshard, rollout",
    "reward": "reward",
    "compute_log_prob": "log-prob",
    "compute_ref_log_prob": "ref log-prob",
    "compute_values": "values",
    "update_critic": "critic update",
    "update_actor": "update",
}
# of the memory schedule of a run with a critic and reward models (memory/schedule.py), in its order
MEMORY_PHASES = (
    *("reshard", "wake_kv", "rollout", "sleep", "rm_scores", "reward", "old_log_prob", "ref", "values", "advantage"),
    *("update_critic", "update"),
)
# where else a process may be: in its start, verl's validation, a wait for the last checkpoint's files, a trace's files
START, VALIDATE, LAST_CHECKPOINT, PROFILE = "start", "validate", "last checkpoint", "profile"
