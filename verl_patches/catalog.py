"""The one table of everything that is replaced upstream, in the order in which a GRPO step meets it.

    rollout -> reward -> ref log-prob -> advantage -> update -> reshard

Rows of platform `cpu` only (stand-ins for what a machine without an accelerator lacks) come last, from platform/cpu/.
"""

from verl_patches.patching.spec import PatchSpec
from verl_patches.platform.cpu import rows_megatron, rows_torch, rows_verl, rows_vllm

_WORKERS = "verl.workers.megatron_workers"
_ACTOR = f"{_WORKERS}:ActorRolloutRefWorker"
_TRAINER = "verl.trainer.ppo.ray_trainer"
_CONTROLLER, _WORKER = frozenset({"controller"}), frozenset({"worker"})
_NEVER = "none: it is what this recipe adds to verl"


def _timed_offload(name: str) -> PatchSpec:
    return PatchSpec(
        id=f"memory.time_{name}", stage="memory", target=f"verl.utils.megatron_utils:{name}", kind="wrap",
        provider="verl_patches.memory.phase_clock:time_offload", bindings=(f"{_WORKERS}:{name}",), processes=_WORKER,
        why="verl counts offload inside rollout, log-prob, ref and update; the step table shows it by itself.",
        exit="verl times offload as a phase of its own",
    )


TRAINING: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="update.fit_as_run", stage="update", target=f"{_TRAINER}:RayPPOTrainer.fit", kind="wrap",
        provider="verl_patches.training.run:fit_as_run", processes=_CONTROLLER,
        why="Proofs before step 1 (rows active, equal digests), record or replay of rollouts, summary.json.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.prove_patches", stage="update", target=f"{_ACTOR}.prove_patches", kind="extend",
        provider="verl_patches.training.worker:prove_patches",
        why="The controller asks every worker for its digest and row states before step 1.", exit=_NEVER,
    ),
    PatchSpec(
        id="update.take_phase_seconds", stage="update", target=f"{_ACTOR}.take_phase_seconds", kind="extend",
        provider="verl_patches.training.worker:take_phase_seconds",
        why="Seconds of reshard and offload are known in the workers only; verl 0.4.0 has no way to ask for them.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.asked_dtype", stage="update", target=f"{_ACTOR}._build_model_optimizer", kind="wrap",
        provider="verl_patches.training.worker:build_in_asked_dtype", processes=_WORKER,
        why="verl 0.4.0 writes bfloat16 into init_model (megatron_workers.py:319); fp32 is what the truth check needs.",
        exit="verl reads the actor's dtype from its configuration",
    ),
    PatchSpec(
        id="update.optimizer_dtype", stage="update", target="verl.utils.megatron.optimizer:get_megatron_optimizer",
        kind="wrap", provider="verl_patches.training.worker:optimizer_follows_model", processes=_WORKER,
        why="init_megatron_optim_config says bf16=True whatever the model is (megatron_utils.py:207).",
        exit="verl derives the optimizer's dtype from the model",
    ),
    PatchSpec(
        id="update.log_with_run", stage="update", target="verl.utils.tracking:Tracking.log", kind="wrap",
        provider="verl_patches.training.run:log_with_run", processes=_CONTROLLER,
        why="One place sees every step's metrics: phase table, summary.json and the log-prob check.", exit=_NEVER,
    ),
    PatchSpec(
        id="logprob.truth_check", stage="logprob", target="verl.trainer.ppo.metric_utils:compute_data_metrics",
        kind="wrap", provider="verl_patches.training.truth_check:add_to_metrics",
        bindings=(f"{_TRAINER}:compute_data_metrics",), processes=_CONTROLLER,
        why="verl compares probabilities, which hides errors of rare tokens; log-probs show a wrong weight at once.",
        exit="verl reports |log-prob delta| of rollout and actor (0.5 and later: rollout correction metrics)",
    ),
    PatchSpec(
        id="reshard.sync_mode", stage="reshard", target=f"{_ACTOR}._build_rollout", kind="wrap",
        provider="verl_patches.training.worker:rollout_with_sync_mode", processes=_WORKER,
        why="recipe.weight_sync must reach the sharding manager, which verl gives no configuration.", exit=_NEVER,
    ),
    PatchSpec(
        id="reshard.switch", stage="reshard",
        target="verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.__enter__", kind="wrap",
        provider="verl_patches.reshard.sync_switch:timed_and_switched", processes=_WORKER,
        why="Counts weight sync as a phase, and can leave it out after the first step: the control run without sync.",
        exit="our own resharder takes this place",
    ),
    *map(_timed_offload, ("load_megatron_model_to_gpu", "offload_megatron_model_to_cpu",
                          "load_megatron_optimizer", "offload_megatron_optimizer")),
)

FUNCTIONAL: tuple[PatchSpec, ...] = TRAINING

STAND_INS: tuple[PatchSpec, ...] = (*rows_torch.ROWS, *rows_megatron.ROWS, *rows_vllm.ROWS, *rows_verl.ROWS)

ROWS: tuple[PatchSpec, ...] = (*FUNCTIONAL, *STAND_INS)
