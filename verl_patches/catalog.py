"""The one table of everything that is replaced upstream, in the order in which a GRPO step meets it.

    rollout -> reward -> ref log-prob -> advantage -> update -> reshard

Then come stand-ins for packages that have no build for the platform, and last the rows of platform `cpu` only (what a
machine without an accelerator lacks), from platform/cpu/rows.py.
"""

from verl_patches.model import a3_rows
from verl_patches.patching.spec import PatchSpec
from verl_patches.platform.cpu import rows as cpu_rows

_WORKERS = "verl.workers.megatron_workers"
_ACTOR = f"{_WORKERS}:ActorRolloutRefWorker"
_TRAINER = "verl.trainer.ppo.ray_trainer"
_MEGATRON_ACTOR = "verl.workers.actor.megatron_actor:MegatronPPOActor"
_A3, _BOTH = frozenset({"a3"}), frozenset({"pypi", "a3"})
_CONTROLLER, _WORKER = frozenset({"controller"}), frozenset({"worker"})
_NEVER = "none: it is what this recipe adds to verl"
_DIRECT = (
    "verl gives every rank every weight, tensor by tensor (verl/utils/megatron_utils.py, per_tensor_generator): at 256 "
    "dies 1.3 TB, where a rank lacks 24.95 GB; and vLLM searches 44,544 expert names one by one."
)


def _timed_offload(name: str) -> PatchSpec:
    return PatchSpec(
        id=f"memory.time_{name}", stage="memory", target=f"verl.utils.megatron_utils:{name}", kind="wrap",
        provider="verl_patches.memory.phase_clock:time_offload", bindings=(f"{_WORKERS}:{name}",),
        processes=_WORKER, lines=_BOTH,
        why="verl counts offload inside rollout, log-prob, ref and update; the step table shows it by itself.",
        exit="verl times offload as a phase of its own",
    )


def _ledger(name: str, target: str, provider: str, why: str, **other: object) -> PatchSpec:
    return PatchSpec(
        id=f"memory.{name}", stage="memory", target=target, kind="wrap", why=why, exit=_NEVER,
        provider=f"verl_patches.memory.in_worker:{provider}", **{"processes": _WORKER, "lines": _BOTH, **other},
    )


def _moved(name: str, function: str, *needs: str) -> PatchSpec:
    return PatchSpec(
        id=f"memory.{name}", stage="memory", target=f"verl.utils.megatron_utils:{function}", kind="wrap",
        provider=f"verl_patches.memory.offload:{name}", bindings=(f"{_WORKERS}:{function}",),
        processes=_WORKER, lines=_BOTH, needs=(f"memory.time_{function}", *needs),
        why="verl makes host memory anew at every offload and pins it by a second copy, brings the reference back to "
            "the host though nothing wrote to it, and trims the pool at every move (verl/utils/megatron_utils.py); "
            "at 54c9b736 it leaves routed experts, in `expert_parallel_buffers`, on the die.",
        exit="verl moves into host memory that it keeps, and only what was written to",
    )


def _checkpoint(name: str) -> PatchSpec:
    return PatchSpec(
        id=f"memory.optimizer_at_{name}", stage="memory", target=f"{_ACTOR}.{name}_checkpoint", kind="wrap",
        provider=f"verl_patches.memory.checkpoints:at_{name}", processes=_WORKER, lines=_BOTH,
        why="verl's checkpoints reach for optimizer states wherever they are; ours have no memory while they are away. "
            "With memory.order* weights are where the order has them, not where verl leaves them.",
        exit="our own checkpoints take this place",
    )


def _order(name: str, update_row: str, **other: object) -> PatchSpec:
    return _ledger(
        name, f"{_ACTOR}.init_model", "keep_order",
        "verl brings training weights to the host and back around every call, gradients for a weight sync too, and at "
        "54c9b736 KV cache and training weights are on the die together; ours is one table (memory/phases.py).",
        needs=("memory.ledger", "memory.ledger_wake", "memory.ledger_rollout", "memory.ledger_sleep",
               "memory.ledger_log_prob", update_row, "memory.offload_model", "memory.offload_optimizer",
               "memory.optimizer_at_save", "memory.optimizer_at_load"), **other)  # fmt: skip


def _trims(name: str, module: str, places: str) -> PatchSpec:
    return PatchSpec(
        id=f"memory.trims_{name}", stage="memory", target=f"{module}:torch", kind="wrap", processes=_WORKER,
        provider="verl_patches.memory.trims:by_order", lines=_BOTH,
        why=f"verl gives the allocator's pool back {places}, and the next stage asks the device for the same memory "
            "again; with memory.order* the order has the trims.",
        exit="verl trims where a stage needs memory past torch's pool, and only there",
    )


def _flash_attn(target: str) -> PatchSpec:
    return PatchSpec(
        id=f"platform.{target.replace('.', '_')}", stage="platform", target=target, kind="stub", default="auto",
        provider="verl_patches.platform.flash_attn", platforms=frozenset({"npu", "cpu"}), lines=_BOTH,
        why="verl/workers/critic/dp_critic.py:24 imports flash_attn.bert_padding wherever megatron_workers is imported "
            "(verl/workers/actor/dp_actor.py:42 too where it sees CUDA); flash_attn has no build for NPU or CPU, and "
            "MindSpeed puts an empty module in its place (mindspeed/megatron_adaptor.py:138).",
        exit="verl imports flash_attn where it is used",
    )


ROLLOUT: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="rollout.llm_arguments", stage="rollout", target="vllm.entrypoints.llm:LLM.__init__", kind="wrap",
        provider="verl_patches.rollout.engine:llm_arguments", processes=_WORKER, lines=_BOTH,
        why="verl 0.4.0 passes limit_mm_per_prompt=None and disable_mm_preprocessor_cache=True for text models too "
            "(vllm_rollout_spmd.py:159-160); vLLM 0.9.1 wants a dict for the first and refuses the second for "
            "text-only models (config.py:695). And vLLM reads the model folder, not verl's override of it: DeepSeek's "
            "config.json says fp8, which vllm-ascend refuses (platform.py:52), also after conversion to bf16.",
        exit="verl passes image arguments only to models that take images, and its override_config to vLLM",
    ),
    PatchSpec(
        id="rollout.dp_place", stage="rollout", target="vllm.config:ParallelConfig.__post_init__", kind="wrap",
        provider="verl_patches.rollout.data_parallel:place_in_launcher", processes=_WORKER, lines=_BOTH,
        why="With external_launcher and data_parallel_size > 1 vLLM 0.9.1 makes every process DP rank 0 with a port of "
            "its own (config.py:1885-1887), so DP ranks never meet.",
        exit="vLLM derives DP rank and meeting point from the launcher when engines are started from outside",
    ),
    PatchSpec(
        id="rollout.fp32_router", stage="rollout",
        target="vllm.model_executor.models.deepseek_v2:DeepseekV2MoE.__init__", kind="wrap",
        provider="verl_patches.rollout.engine:route_in_fp32", processes=_WORKER, lines=_BOTH,
        platforms=frozenset({"cuda", "cpu"}),  # vllm-ascend builds its own class (models/deepseek_v2.py:293)
        why="vLLM 0.9.1 routes in the model's dtype (deepseek_v2.py:105-118), training and the checkpoint's bias are "
            "fp32: in bf16 near scores change places and tokens go to other experts than in training.",
        exit="vLLM routes DeepSeek-V3 in fp32",
    ),
    PatchSpec(
        id="rollout.absorb_mla_again", stage="rollout", kind="wrap",
        target="vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM.load_weights",
        provider="verl_patches.rollout.engine:absorb_mla_again", processes=_WORKER, lines=_A3,
        why="vLLM's MLA decodes with projections that it derives from kv_b_proj at start (mla/common.py:1115) and that "
            "follow a weight sync as views of it only; vllm-ascend copies them (attention/mla_v1.py:669) and MindSpeed "
            "makes torch.Tensor.view copy (mindspeed/megatron_adaptor.py:157): decoding would go on with the first "
            "weights.",
        exit="vLLM derives them again when weights are loaded, or MindSpeed leaves torch.Tensor.view alone",
    ),
    PatchSpec(
        id="rollout.keep_log_probs", stage="rollout", kind="wrap",
        target="verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
        provider="verl_patches.rollout.log_probs:keep_sampled", processes=_WORKER, lines=_BOTH,
        why="verl 54c9b736 has vLLM compute the log-probs of sampled tokens (vllm_rollout_spmd.py:173) and drops them; "
            "the truth check compares them with the actor's, on both lines with recipe.logprob_check.every those of "
            "sequences that are sampled for it while vLLM is awake.",
        exit=_NEVER,
    ),
)

MODEL: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="model.config", stage="model", target="verl.models.mcore.registry:MODEL_CONFIG_CONVERTER_REGISTRY",
        kind="register", provider="verl_patches.model.config:converters", processes=_WORKER,
        why="verl's DeepSeek-V3 converter (verl/models/mcore/config_converter.py:187) drops group-limited routing, "
            "computes the router in fp64, trains with a balancing loss and lets training move the correction bias.",
        exit="verl sets moe_router_num_groups and moe_router_group_topk for DeepSeek-V3",
    ),
    PatchSpec(
        id="model.mla_k_pe_grad", stage="model",
        target="megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__", kind="wrap",
        provider="verl_patches.model.mla:sum_k_pe_grad", processes=_WORKER,
        why="Under TP each rank keeps only its own heads' part of the rotary key's gradient "
            "(megatron/core/transformer/multi_latent_attention.py:404; verl's patch_v012.py has a copy).",
        exit="megatron-core sums the gradient of k_pos_emb over TP ranks",
    ),
    PatchSpec(
        id="model.load_hf", stage="model", target="verl.utils.model:load_megatron_gptmodel_weights", kind="wrap",
        provider="verl_patches.model.load:load_deepseekv3", bindings=(f"{_WORKERS}:load_megatron_gptmodel_weights",),
        processes=_WORKER,
        why="verl loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py), "
            "through a whole HF model on every rank (verl/utils/model.py:350).",
        exit="verl loads DeepSeek-V3 safetensors into Megatron",
    ),
    PatchSpec(
        id="model.train_dtype", stage="model", target=f"{_ACTOR}._build_model_optimizer", kind="wrap",
        provider="verl_patches.model.precision:build_in_asked_dtype", processes=_WORKER, lines=_BOTH,
        needs=("model.optimizer_dtype",),
        why="The Megatron worker writes bfloat16 down (verl/workers/megatron_workers.py:334); fp32 is what tells a "
            "wrong weight from rounding.",
        exit="verl reads the actor's dtype from its configuration",
    ),
    PatchSpec(
        id="model.optimizer_dtype", stage="update", target="verl.utils.megatron.optimizer:get_megatron_optimizer",
        kind="wrap", provider="verl_patches.model.precision:optimizer_of_model_dtype", processes=_WORKER, lines=_BOTH,
        why="verl's optimizer config says bf16 whatever the model is (verl/utils/megatron_utils.py:207).",
        exit="verl derives the optimizer's dtype from the model's",
    ),
)

TRAINING: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="dispatch.send_switches", stage="comm", target="ray._private.worker:init", kind="wrap",
        provider="verl_patches.training.worker_settings:send_switches", bindings=("ray:init",), processes=_CONTROLLER,
        lines=_BOTH,
        why="Variables of the driver's shell do not reach nodes where `ray start` ran without them: their workers "
            "would run other patches than the driver means.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.recipe_by_default", stage="update", target=f"{_TRAINER}:RayPPOTrainer.__init__", kind="wrap",
        provider="verl_patches.cluster.import_alone:recipe_by_default", processes=_CONTROLLER, lines=_BOTH,
        why="verl's own entry point composes no `recipe:`, which rows of controller and workers read.", exit=_NEVER,
    ),
    PatchSpec(
        id="update.fit_as_run", stage="update", target=f"{_TRAINER}:RayPPOTrainer.fit", kind="wrap",
        provider="verl_patches.training.run:fit_as_run", processes=_CONTROLLER, lines=_BOTH,
        why="Proofs before step 1 (rows active, equal digests), record or replay of rollouts, summary.json.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.prove_patches", stage="update", target=f"{_ACTOR}.prove_patches", kind="extend",
        provider="verl_patches.training.worker:prove_patches", lines=_BOTH,
        why="The controller asks every worker for its digest and row states before step 1.", exit=_NEVER,
    ),
    PatchSpec(
        id="update.take_phase_seconds", stage="update", target=f"{_ACTOR}.take_phase_seconds", kind="extend",
        provider="verl_patches.training.worker:take_phase_seconds", lines=_BOTH,
        why="Seconds of reshard and offload are known in the workers only; verl 0.4.0 has no way to ask for them.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.take_sync_reports", stage="update", target=f"{_ACTOR}.take_sync_reports", kind="extend",
        provider="verl_patches.training.worker:take_sync_reports", lines=_BOTH,
        why="Bytes, collectives and memory of each weight sync are known in the workers only.", exit=_NEVER,
    ),
    PatchSpec(
        id="update.take_log_prob_moments", stage="update", target=f"{_ACTOR}.take_log_prob_moments", kind="extend",
        provider="verl_patches.training.worker:take_log_prob_moments", lines=_BOTH,
        why="Where the update's log-probs are the old ones, how far vLLM's are from them is known in the workers only.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.take_checked", stage="update", target=f"{_ACTOR}.take_checked", kind="extend",
        provider="verl_patches.training.worker:take_checked", lines=_BOTH, needs=("rollout.keep_log_probs",),
        why="What vLLM sampled for the truth check is known in the workers only.", exit=_NEVER,
    ),
    PatchSpec(
        id="update.on_policy", stage="update", target=f"{_ACTOR}.update_actor", kind="wrap",
        provider="verl_patches.training.old_log_prob:update_on_policy", processes=_WORKER, lines=_BOTH,
        needs=("update.take_log_prob_moments", "update.loss_on_policy"),
        why="verl computes old log-probs in a pass of its own (verl/trainer/ppo/ray_trainer.py) also where the update "
            "finds the same ones, and never makes up for vLLM's differing from them.",
        exit="the pins move to a verl with algorithm.rollout_correction that leaves the pass out on policy (verl 3996)",
    ),
    PatchSpec(
        id="update.loss_on_policy", stage="update", target="verl.trainer.ppo.core_algos:compute_policy_loss",
        kind="wrap", provider="verl_patches.training.old_log_prob:loss_on_policy", processes=_WORKER, lines=_BOTH,
        bindings=("verl.workers.actor.megatron_actor:compute_policy_loss",
                  "verl.workers.actor.dp_actor:compute_policy_loss"),
        why="The only place where an update's own log-probs can take the place of old ones.",
        exit="as update.on_policy",
    ),
    PatchSpec(
        id="rollout.keep_responses", stage="rollout", kind="wrap", processes=_WORKER, lines=_BOTH,
        target="verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.postprocess_data",
        provider="verl_patches.training.kept_worker:keep_responses",
        why="Here a step's responses are on the device, and this rank's own, for the last time: verl sends all of it "
            "through the trainer, padded, and back for each stage (verl/single_controller/base/decorator.py).",
        exit="verl's stages leave their tensors on the workers for the next",
    ),
    PatchSpec(
        id="update.run_kept", stage="update", target=f"{_ACTOR}.run_kept", kind="extend",
        provider="verl_patches.training.kept_worker:run_kept", lines=_BOTH, needs=("rollout.keep_responses",),
        why="verl has no calls of its stages that take their tensors from the workers.",
        exit="as rollout.keep_responses",
    ),
    PatchSpec(
        id="update.micro_batches_as_planned", stage="update", kind="wrap", processes=_WORKER,
        target="verl.utils.seqlen_balancing:rearrange_micro_batches",
        provider="verl_patches.training.kept_micro_batches:as_planned",
        bindings=("verl.workers.actor.megatron_actor:rearrange_micro_batches",
                  "verl.workers.actor.dp_actor:rearrange_micro_batches",
                  "verl.workers.critic.megatron_critic:rearrange_micro_batches",
                  "verl.workers.critic.dp_critic:rearrange_micro_batches",
                  "verl.workers.reward_model.megatron.reward_model:rearrange_micro_batches"),
        why="Dynamic batch size: verl packs rank by rank, above the token budget at times, and the n-th micro batches "
            "of two replicas are not equally long (verl/utils/seqlen_balancing.py).",
        exit="verl plans dynamic micro batches for all replicas together, within the budget",
    ),
    PatchSpec(
        id="update.log_with_run", stage="update", target="verl.utils.tracking:Tracking.log", kind="wrap",
        provider="verl_patches.training.run:log_with_run", processes=_CONTROLLER, lines=_BOTH,
        why="One place sees every step's metrics: phase table, summary.json and the log-prob check.", exit=_NEVER,
    ),
    PatchSpec(
        id="logprob.truth_check", stage="logprob", target="verl.trainer.ppo.metric_utils:compute_data_metrics",
        kind="wrap", provider="verl_patches.training.rollout_correction:add_to_metrics",
        bindings=(f"{_TRAINER}:compute_data_metrics",), processes=_CONTROLLER, lines=_BOTH,
        why="verl compares probabilities, which hides errors of rare tokens; log-probs show a wrong weight at once.",
        exit="verl reports |log-prob delta| of rollout and actor (0.5 and later: rollout correction metrics)",
    ),
    PatchSpec(
        id="update.sync_mode", stage="reshard", target=f"{_ACTOR}._build_rollout", kind="wrap",
        provider="verl_patches.training.worker:rollout_with_sync_mode", processes=_WORKER, lines=_BOTH,
        why="recipe.weight_sync must reach the sharding manager, which verl gives no configuration.", exit=_NEVER,
    ),
    PatchSpec(
        id="update.sync_switch", stage="reshard",
        target="verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.__enter__", kind="wrap",
        provider="verl_patches.reshard.sync_switch:timed_and_switched", processes=_WORKER,
        why="Counts weight sync as a phase, and can leave it out after the first step: the control run without sync.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.sync_switch_and_wake", stage="reshard",
        target="verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.__enter__", kind="wrap",
        provider="verl_patches.reshard.sync_switch:timed_and_switched_with_cache", processes=_WORKER, lines=_A3,
        why="As update.sync_switch; at verl 54c9b736 this method wakes vLLM's KV cache too (megatron_vllm.py:334).",
        exit="the pins move to verl 0.4.0 or later, where update.sync_switch serves",
    ),
    PatchSpec(
        id="reshard.direct", stage="reshard", kind="wrap", processes=_WORKER,
        needs=("update.sync_switch", "update.sync_mode"),
        target="verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.__enter__",
        provider="verl_patches.reshard.in_loop:direct",
        why=_DIRECT, exit="verl sends each rank the weights that it lacks, and those only",
    ),
    PatchSpec(
        id="reshard.direct_and_wake", stage="reshard", kind="wrap", processes=_WORKER, lines=_A3,
        needs=("update.sync_switch_and_wake", "update.sync_mode"),
        target="verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.__enter__",
        provider="verl_patches.reshard.in_loop:direct_with_cache",
        why=_DIRECT + " At 54c9b736 this method wakes vLLM's KV cache too (megatron_vllm.py:334).",
        exit="as reshard.direct",
    ),
    PatchSpec(
        id="model.local_names", stage="reshard", target="verl.utils.model:normalize_model_name", kind="wrap",
        provider="verl_patches.model.names:te_names_for_verl",
        bindings=("verl.utils.megatron_utils:normalize_model_name",), processes=_WORKER,
        why="verl's per_tensor_generator and DeepSeek-V3 converter know Transformer Engine's parameter names only "
            "(verl/utils/megatron_utils.py:798, verl/models/mcore/weight_converter.py:172).",
        exit="verl accepts the names of Megatron's own modules",
    ),
    *map(_timed_offload, ("load_megatron_model_to_gpu", "offload_megatron_model_to_cpu",
                          "load_megatron_optimizer", "offload_megatron_optimizer")),
    _ledger("ledger", f"{_ACTOR}.init_model", "keep_ledger",
            "verl never looks at who is on the device; the ledger watches what the worker has built."),
    PatchSpec(
        id="memory.rollout_life", stage="memory", target="vllm.entrypoints.llm:LLM.__init__", kind="wrap",
        provider="verl_patches.memory.engine_life:taken_over", processes=_WORKER, lines=_BOTH,
        needs=("rollout.llm_arguments",),
        why="vLLM's sleep mode copies all weights to the host at every sleep, where the weight sync overwrites them, "
            "and takes memory past torch's allocator; a CPU has none. Ours gives the storages' memory back and takes "
            "it again. With enforce_eager=false vLLM's stays, without that copy: graphs need their addresses.",
        exit="vLLM drops weights that are to be replaced, at sleep, into torch's pool",
    ),
    PatchSpec(
        id="memory.trim_before_wake", stage="memory", target="vllm.entrypoints.llm:LLM.wake_up", kind="wrap",
        provider="verl_patches.memory.offload:trim_before_wake", processes=_WORKER, lines=_BOTH,
        why="vLLM's sleep mode maps device memory past torch's allocator, whose pool must be empty then; with rows "
            "memory.offload_* moves leave it filled for each other.",
        exit="rollout weights and KV cache come from torch's allocator",
    ),
    _ledger("ledger_wake", "vllm.entrypoints.llm:LLM.wake_up", "wake", "The phases reshard and wake_kv begin here.",
            needs=("memory.trim_before_wake",)),
    _ledger("ledger_rollout", "vllm.entrypoints.llm:LLM.generate", "generate", "The phase rollout begins here."),
    _ledger("ledger_sleep", "vllm.entrypoints.llm:LLM.sleep", "sleep", "The phase sleep begins here."),
    _ledger("ledger_log_prob", f"{_MEGATRON_ACTOR}.compute_log_prob", "log_prob",
            "The phases old_log_prob and ref begin here."),
    _ledger("ledger_update", f"{_MEGATRON_ACTOR}.update_policy", "update", "The phase update begins here.",
            lines=frozenset({"pypi"})),
    _ledger("ledger_update_a3", f"{_MEGATRON_ACTOR}.update_policy", "update",
            "As memory.ledger_update, over the learning-rate schedule of this line.", lines=_A3,
            needs=("update.lr_schedule",)),
    PatchSpec(
        id="memory.take_memory", stage="memory", target=f"{_ACTOR}.take_memory", kind="extend",
        provider="verl_patches.memory.in_worker:take_memory", lines=_BOTH,
        why="What the ledgers saw is known in the workers only.", exit=_NEVER,
    ),
    _moved("load_model", "load_megatron_model_to_gpu"),
    _moved("offload_model", "offload_megatron_model_to_cpu", "memory.load_model"),
    _moved("load_optimizer", "load_megatron_optimizer"),
    _moved("offload_optimizer", "offload_megatron_optimizer", "memory.load_optimizer"),
    _checkpoint("save"), _checkpoint("load"),
    _order("order", "memory.ledger_update", lines=frozenset({"pypi"})),
    _order("order_a3", "memory.ledger_update_a3", lines=_A3),
    _trims("worker", _WORKERS, "after every call (megatron_workers.py, the end of each)"),
    _trims("actor", "verl.workers.actor.megatron_actor", "after each pass and update (megatron_actor.py)"),
    _trims("sleep", "verl.workers.sharding_manager.megatron_vllm", "after vLLM went to sleep (megatron_vllm.py)"),
    PatchSpec(
        id="memory.swap_optimizer", stage="memory", target=f"{_ACTOR}._build_model_optimizer", kind="wrap",
        provider="verl_patches.memory.swap_optimizer:build_swapped", processes=_WORKER, needs=("model.train_dtype",),
        why="Megatron 0.12.2 steps all states at once, on the device or on the host (optimizer_cpu_offload); "
            "recipe.train.swap_optimizer streams them through the device in pieces, as MindSpeed does on line a3.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="memory.take_offload", stage="memory", target=f"{_ACTOR}.take_offload", kind="extend",
        provider="verl_patches.training.worker:take_offload", lines=_BOTH,
        why="What was moved, and what it took, is known in the workers only.", exit=_NEVER,
    ),
)

DISPATCH: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="dispatch.put_once", stage="comm", kind="wrap", processes=_CONTROLLER, lines=_BOTH,
        target="verl.single_controller.ray.base:RayWorkerGroup.execute_all_async",
        provider="verl_patches.comm.dispatch:put_before_calling",
        why="verl serialises each worker's arguments in that worker's own call (execute_all_async), at 54c9b736 also a "
            "batch that all ranks of a replica share: the last worker starts when all others have been served.",
        exit="verl puts every large argument into Ray's store once, before it calls the first worker",
    ),
    PatchSpec(
        id="dispatch.note_starts", stage="comm", kind="wrap", processes=_WORKER, lines=_BOTH,
        target="verl.single_controller.base.decorator:register", provider="verl_patches.comm.starts:noted",
        bindings=("verl.single_controller.base.worker:register", f"{_WORKERS}:register",
                  "verl.workers.fsdp_workers:register"),
        why="How far apart workers start is known in the workers only, and verl does not look.", exit=_NEVER,
    ),
    PatchSpec(
        id="dispatch.take_starts", stage="comm", target=f"{_ACTOR}.take_starts", kind="extend",
        provider="verl_patches.training.worker:take_starts", lines=_BOTH,
        needs=("dispatch.note_starts", "dispatch.put_once"),
        why="The controller asks every worker for its starts at the end of a step.", exit=_NEVER,
    ),
)

FUNCTIONAL: tuple[PatchSpec, ...] = (*ROLLOUT, *MODEL, *a3_rows.ROWS, *TRAINING, *DISPATCH)

NO_BUILD: tuple[PatchSpec, ...] = (_flash_attn("flash_attn"), _flash_attn("flash_attn.bert_padding"))

STAND_INS: tuple[PatchSpec, ...] = cpu_rows.ROWS

ROWS: tuple[PatchSpec, ...] = (*FUNCTIONAL, *NO_BUILD, *STAND_INS)
