"""Name the phases and calls of one GRPO step; tables, reports and models derive their names from these. No torch."""

from __future__ import annotations

from typing import NamedTuple


class StepPhase(NamedTuple):
    """Describe one phase of a step.

    name: its name in the step's record (summary.json), metrics and columns.
    schedule_name: its name in the memory schedule (memory/schedule.py), the step model and heartbeats.
    timer: verl's timer around it; None where workers measure it.
    call: the trainer's call that contains it; None where several or none do.
    critic: only runs with a critic have it.
    """

    name: str
    schedule_name: str
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
CALL_LABELS = {  # call of the trainer -> text shown while it runs, in a step's order; the reward runs without workers
    "generate_sequences": "reshard, rollout",
    "reward": "reward",
    "compute_log_prob": "log-prob",
    "compute_ref_log_prob": "ref log-prob",
    "compute_values": "values",
    "update_critic": "critic update",
    "update_actor": "update",
}
# phases of the memory schedule of a run with a critic and reward models (memory/schedule.py), in its order
MEMORY_PHASES = (
    *("reshard", "wake_kv", "rollout", "sleep", "rm_scores", "reward", "old_log_prob", "ref", "values", "advantage"),
    *("update_critic", "update"),
)
# other phases of a process: its start, verl's validation, waiting for the last checkpoint's files, waiting for ranks
# that still load, writing a trace
START, VALIDATE, LAST_CHECKPOINT, LOADED, PROFILE = "start", "validate", "last checkpoint", "loaded", "profile"
