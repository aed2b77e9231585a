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
_MANAGER = "verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager"
_PYPI, _A3 = frozenset({"pypi"}), frozenset({"a3"})
_CONTROLLER, _WORKER = frozenset({"controller"}), frozenset({"worker"})
_NEVER = "none: it is what this recipe adds to verl"


def _flash_attn(target: str) -> PatchSpec:
    return PatchSpec(
        id=f"platform.{target.replace('.', '_')}",
        stage="platform",
        target=target,
        kind="stub",
        provider="verl_patches.platform.flash_attn",
        platforms=frozenset({"npu", "cpu"}),
        why="verl/workers/critic/dp_critic.py:24 imports flash_attn.bert_padding wherever megatron_workers is imported "
        "(verl/workers/actor/dp_actor.py:42 too where it sees CUDA); flash_attn has no build for NPU or CPU, and "
        "MindSpeed puts an empty module in its place (mindspeed/megatron_adaptor.py:138).",
        exit="verl imports flash_attn where it is used",
    )


ROLLOUT: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="rollout.engine",
        stage="rollout",
        target="vllm.entrypoints.llm:LLM",
        kind="subclass",
        provider="verl_patches.worker.rollout_engine:RolloutEngine",
        processes=_WORKER,
        bindings=(
            "vllm:LLM",
            "vllm.benchmarks.latency:LLM",
            "mindspeed_llm.tasks.posttrain.rejection_sampling.rejection_sampling:LLM@a3",
            "verl.third_party.vllm:LLM",
            "verl.third_party.vllm.vllm_v_0_5_4.llm:LLM",
            "verl.third_party.vllm.vllm_v_0_6_3.llm:LLM",
            "verl.workers.rollout.vllm_rollout.vllm_rollout:LLM",
            "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:LLM",
            "verl.workers.sharding_manager.fsdp_vllm:LLM",
            "verl.workers.sharding_manager.megatron_vllm:LLM",
        ),
        why="Phases of the step begin where the engine wakes, generates and sleeps; verl 0.4.0 and 54c9b736 call it at "
        "different places.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="rollout.llm_arguments",
        stage="rollout",
        target="vllm.entrypoints.llm:LLM.__init__",
        kind="override",
        provider="verl_patches.worker.rollout_engine:RolloutEngine.__init__",
        processes=_WORKER,
        needs=("rollout.engine",),
        why="verl 0.4.0 passes limit_mm_per_prompt=None and disable_mm_preprocessor_cache=True for text models too "
        "(vllm_rollout_spmd.py:159-160); vLLM 0.9.1 wants a dict for the first and refuses the second for "
        "text-only models (config.py:695). And vLLM reads the model folder, not verl's override of it: DeepSeek's "
        "config.json says fp8, which vllm-ascend refuses (platform.py:52), also after conversion to bf16.",
        exit="verl passes image arguments only to models that take images, and its override_config to vLLM",
    ),
    PatchSpec(
        id="rollout.dp_place",
        stage="rollout",
        target="vllm.config:ParallelConfig.__post_init__",
        kind="wrap",
        provider="verl_patches.rollout.engine:set_dp_rank_in_launcher",
        processes=_WORKER,
        why="With external_launcher and data_parallel_size > 1 vLLM 0.9.1 makes every process DP rank 0 with a port of "
        "its own (config.py:1885-1887), so DP ranks never meet.",
        exit="vLLM derives DP rank and meeting point from the launcher when engines are started from outside",
    ),
    PatchSpec(
        id="rollout.fp32_router",
        stage="rollout",
        target="vllm.model_executor.models.deepseek_v2:DeepseekV2MoE.__init__",
        kind="wrap",
        provider="verl_patches.rollout.engine:route_in_fp32",
        processes=_WORKER,
        platforms=frozenset({"cuda", "cpu"}),  # vllm-ascend builds its own class (models/deepseek_v2.py:293)
        why="vLLM 0.9.1 routes in the model's dtype (deepseek_v2.py:105-118), training and the checkpoint's bias are "
        "fp32: in bf16 near scores change places and tokens go to other experts than in training.",
        exit="vLLM routes DeepSeek-V3 in fp32",
    ),
    PatchSpec(
        id="rollout.absorb_mla_again",
        stage="rollout",
        kind="wrap",
        target="vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM.load_weights",
        provider="verl_patches.rollout.engine:refresh_absorbed_mla",
        processes=_WORKER,
        lines=_A3,
        why="vLLM's MLA decodes with projections that it derives from kv_b_proj at start (mla/common.py:1115) and that "
        "follow a weight sync as views of it only; vllm-ascend copies them (attention/mla_v1.py:669) and MindSpeed "
        "makes torch.Tensor.view copy (mindspeed/megatron_adaptor.py:157): decoding would go on with the first "
        "weights.",
        exit="vLLM derives them again when weights are loaded, or MindSpeed leaves torch.Tensor.view alone",
    ),
    PatchSpec(
        id="rollout.keep_log_probs",
        stage="rollout",
        kind="wrap",
        target="verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
        provider="verl_patches.rollout.log_probs:keep_rollout_log_probs",
        processes=_WORKER,
        why="verl 54c9b736 has vLLM compute the log-probs of sampled tokens (vllm_rollout_spmd.py:173) and drops them; "
        "the truth check compares them with the actor's, on both lines with recipe.logprob_check.every those of "
        "sequences that are sampled for it while vLLM is awake.",
        exit=_NEVER,
    ),
)

MODEL: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="model.config",
        stage="model",
        target="verl.models.mcore.registry:MODEL_CONFIG_CONVERTER_REGISTRY",
        kind="register",
        provider="verl_patches.model.megatron:converters",
        processes=_WORKER,
        lines=_PYPI,
        why="verl's DeepSeek-V3 converter (verl/models/mcore/config_converter.py:187) drops group-limited routing, "
        "computes the router in fp64, trains with a balancing loss and lets training move the correction bias.",
        exit="verl sets moe_router_num_groups and moe_router_group_topk for DeepSeek-V3",
    ),
    PatchSpec(
        id="model.mla_k_pe_grad",
        stage="model",
        target="megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        kind="wrap",
        provider="verl_patches.model.megatron:sum_k_pe_grad",
        processes=_WORKER,
        lines=_PYPI,
        why="Under TP each rank keeps only its own heads' part of the rotary key's gradient "
        "(megatron/core/transformer/multi_latent_attention.py:404; verl's patch_v012.py has a copy).",
        exit="megatron-core sums the gradient of k_pos_emb over TP ranks",
    ),
    PatchSpec(
        id="model.load_hf",
        stage="model",
        target="verl.utils.model:load_megatron_gptmodel_weights",
        kind="wrap",
        provider="verl_patches.model.weights:load_deepseekv3",
        bindings=(f"{_WORKERS}:load_megatron_gptmodel_weights",),
        processes=_WORKER,
        lines=_PYPI,
        why="verl loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py), "
        "through a whole HF model on every rank (verl/utils/model.py:350).",
        exit="verl loads DeepSeek-V3 safetensors into Megatron",
    ),
    PatchSpec(
        id="model.train_dtype",
        stage="model",
        target=f"{_ACTOR}._build_model_optimizer",
        kind="override",
        provider="verl_patches.worker.recipe_worker:RecipeWorker._build_model_optimizer",
        processes=_WORKER,
        needs=("update.recipe_worker", "model.optimizer_dtype"),
        why="The Megatron worker writes bfloat16 down (verl/workers/megatron_workers.py:334); fp32 is what tells a "
        "wrong weight from rounding.",
        exit="verl reads the actor's dtype from its configuration",
    ),
    PatchSpec(
        id="model.optimizer_dtype",
        stage="model",
        target="verl.utils.megatron.optimizer:get_megatron_optimizer",
        kind="wrap",
        provider="verl_patches.model.megatron:optimizer_in_model_dtype",
        processes=_WORKER,
        why="verl's optimizer config says bf16 whatever the model is (verl/utils/megatron_utils.py:207).",
        exit="verl derives the optimizer's dtype from the model's",
    ),
)

CONTROLLER: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="dispatch.send_switches",
        stage="dispatch",
        target="ray._private.worker:init",
        kind="wrap",
        provider="verl_patches.trainer.worker_settings:send_switches",
        bindings=("ray:init",),
        processes=_CONTROLLER,
        why="Variables of the driver's shell do not reach nodes where `ray start` ran without them: their workers "
        "would run other patches than the driver means.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.recipe_by_default",
        stage="update",
        target=f"{_TRAINER}:RayPPOTrainer.__init__",
        kind="wrap",
        provider="verl_patches.launch.import_alone:recipe_by_default",
        processes=_CONTROLLER,
        why="verl's own entry point composes no `recipe:`, which rows of controller and workers read.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.fit_as_run",
        stage="update",
        target=f"{_TRAINER}:RayPPOTrainer.fit",
        kind="wrap",
        provider="verl_patches.trainer.run:fit_as_run",
        processes=_CONTROLLER,
        needs=("update.recipe_worker",),
        why="Worker handshake before step 1 (rows active, equal digests), record or replay of rollouts, summary.json.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.log_with_run",
        stage="update",
        target="verl.utils.tracking:Tracking.log",
        kind="wrap",
        provider="verl_patches.trainer.run:log_with_run",
        processes=_CONTROLLER,
        why="One place sees every step's metrics: phase table, summary.json and the log-prob check.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="logprob.truth_check",
        stage="logprob",
        target="verl.trainer.ppo.metric_utils:compute_data_metrics",
        kind="wrap",
        provider="verl_patches.trainer.rollout_correction:add_to_metrics",
        bindings=(f"{_TRAINER}:compute_data_metrics",),
        processes=_CONTROLLER,
        why="verl compares probabilities, which hides errors of rare tokens; log-probs show a wrong weight at once.",
        exit="verl reports |log-prob delta| of rollout and actor (0.5 and later: rollout correction metrics)",
    ),
)

RESHARD: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="update.sharding_manager",
        stage="update",
        kind="subclass",
        target=_MANAGER,
        processes=_WORKER,
        provider="verl_patches.worker.sharding:RecipeShardingManager",
        needs=("rollout.engine",),
        why="Counts weight sync as a phase, and can leave it out after the first step: the control run without sync.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="reshard.direct",
        stage="reshard",
        kind="override",
        target=f"{_MANAGER}.__enter__",
        processes=_WORKER,
        provider="verl_patches.worker.sharding:RecipeShardingManager.__enter__",
        needs=("update.sharding_manager", "update.recipe_worker"),
        why="verl gives every rank every weight, tensor by tensor (verl/utils/megatron_utils.py, "
        "per_tensor_generator): at 256 dies 1.3 TB, where a rank lacks 24.95 GB; and vLLM searches 44,544 expert "
        "names one by one.",
        exit="verl sends each rank the weights that it lacks, and those only",
    ),
    PatchSpec(
        id="model.local_names",
        stage="model",
        target="verl.utils.model:normalize_model_name",
        kind="wrap",
        provider="verl_patches.model.weights:te_names_for_verl",
        bindings=("verl.utils.megatron_utils:normalize_model_name",),
        processes=_WORKER,
        lines=_PYPI,
        why="verl's per_tensor_generator and DeepSeek-V3 converter know Transformer Engine's parameter names only "
        "(verl/utils/megatron_utils.py:798, verl/models/mcore/weight_converter.py:172).",
        exit="verl accepts the names of Megatron's own modules",
    ),
)

UPDATE: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="update.recipe_worker",
        stage="update",
        target=_ACTOR,
        kind="subclass",
        provider="verl_patches.worker.recipe_worker:RecipeWorker",
        why="The step of a worker is written down in one class: phases of memory, weight sync, on-policy update, "
        "tensors that stay on the device, handshake and report.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="update.on_policy",
        stage="update",
        target=f"{_ACTOR}.update_actor",
        kind="override",
        provider="verl_patches.worker.recipe_worker:RecipeWorker.update_actor",
        processes=_WORKER,
        needs=("update.recipe_worker", "update.loss_on_policy"),
        why="verl computes old log-probs in a pass of its own (verl/trainer/ppo/ray_trainer.py) also where the update "
        "finds the same ones, and never makes up for vLLM's differing from them.",
        exit="the pins move to a verl with algorithm.rollout_correction that leaves the pass out on policy (verl 3996)",
    ),
    PatchSpec(
        id="update.loss_on_policy",
        stage="update",
        target="verl.trainer.ppo.core_algos:compute_policy_loss",
        kind="wrap",
        provider="verl_patches.worker.on_policy_update:loss_on_policy",
        processes=_WORKER,
        bindings=(
            "verl.workers.actor.megatron_actor:compute_policy_loss",
            "verl.workers.actor.dp_actor:compute_policy_loss",
        ),
        why="The only place where an update's own log-probs can take the place of old ones.",
        exit="as update.on_policy",
    ),
    PatchSpec(
        id="update.tensor_cache",
        stage="update",
        kind="override",
        target=f"{_MANAGER}.postprocess_data",
        provider="verl_patches.worker.sharding:RecipeShardingManager.postprocess_data",
        processes=_WORKER,
        needs=("update.sharding_manager", "update.recipe_worker"),
        why="Here a step's responses are on the device, and this rank's own, for the last time: verl sends all of it "
        "through the trainer, padded, and back for each stage (verl/single_controller/base/decorator.py).",
        exit="verl's stages leave their tensors on the workers for the next",
    ),
    PatchSpec(
        id="update.micro_batches_as_planned",
        stage="update",
        kind="wrap",
        processes=_WORKER,
        lines=_PYPI,
        target="verl.utils.seqlen_balancing:rearrange_micro_batches",
        provider="verl_patches.worker.tensor_cache_stages:as_planned",
        bindings=(
            "verl.workers.actor.megatron_actor:rearrange_micro_batches",
            "verl.workers.actor.dp_actor:rearrange_micro_batches",
            "verl.workers.critic.megatron_critic:rearrange_micro_batches",
            "verl.workers.critic.dp_critic:rearrange_micro_batches",
            "verl.workers.reward_model.megatron.reward_model:rearrange_micro_batches",
        ),
        why="Dynamic batch size: verl packs rank by rank, above the token budget at times, and the n-th micro batches "
        "of two replicas are not equally long (verl/utils/seqlen_balancing.py).",
        exit="verl plans dynamic micro batches for all replicas together, within the budget",
    ),
)

MEMORY: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="memory.ledger",
        stage="memory",
        target=f"{_ACTOR}.init_model",
        kind="override",
        processes=_WORKER,
        provider="verl_patches.worker.recipe_worker:RecipeWorker.init_model",
        needs=("update.recipe_worker", "rollout.engine"),
        why="verl never looks at what is on the device; the ledger watches what the worker has built.",
        exit=_NEVER,
    ),
    PatchSpec(
        id="memory.order",
        stage="memory",
        target=f"{_ACTOR}.init_model",
        kind="override",
        processes=_WORKER,
        provider="verl_patches.worker.recipe_worker:RecipeWorker.init_model",
        needs=("update.recipe_worker", "rollout.engine", "update.sharding_manager", "memory.empty_cache"),
        why="verl brings training weights to the host and back around every call, gradients for a weight sync too, "
        "into host memory made anew each time and pinned by a second copy; at 54c9b736 it leaves routed experts on "
        "the die, and has KV cache and training weights there together. Ours is one table (memory/schedule.py).",
        exit="verl moves memory by one table, into host memory that it keeps, and only what was written to",
    ),
    PatchSpec(
        id="memory.empty_cache",
        stage="memory",
        target=f"{_WORKERS}:torch",
        kind="wrap",
        processes=_WORKER,
        provider="verl_patches.worker.empty_cache:without_empty_cache",
        bindings=("verl.workers.actor.megatron_actor:torch",),
        why="verl gives the allocator's pool back after every call, pass and update (megatron_workers.py, "
        "megatron_actor.py), and the next stage asks the device for the same memory again; with memory.order the "
        "schedule says where.",
        exit="verl empties the cache where a stage needs memory past torch's pool, and only there",
    ),
    PatchSpec(
        id="memory.sleep_mode",
        stage="memory",
        target="vllm.entrypoints.llm:LLM.sleep",
        kind="override",
        provider="verl_patches.worker.rollout_engine:RolloutEngine.sleep",
        processes=_WORKER,
        needs=("rollout.engine",),
        why="vLLM's sleep mode copies all weights to the host at every sleep, where the weight sync overwrites them, "
        "and takes memory past torch's allocator; a CPU has none. Ours gives the storages' memory back and takes "
        "it again. With enforce_eager=false vLLM's stays, without that copy: graphs need their addresses.",
        exit="vLLM drops weights that are to be replaced, at sleep, into torch's pool",
    ),
    PatchSpec(
        id="memory.swap_optimizer",
        stage="memory",
        target=f"{_ACTOR}._build_model_optimizer",
        kind="override",
        provider="verl_patches.worker.recipe_worker:RecipeWorker._build_model_optimizer",
        processes=_WORKER,
        lines=_PYPI,
        needs=("update.recipe_worker", "model.train_dtype"),
        why="Megatron 0.12.2 steps all states at once, on the device or on the host (optimizer_cpu_offload); "
        "recipe.train.swap_optimizer streams them through the device in pieces, as MindSpeed does on line a3.",
        exit=_NEVER,
    ),
)

DISPATCH: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="dispatch.put_once",
        stage="dispatch",
        kind="wrap",
        processes=_CONTROLLER,
        target="verl.single_controller.ray.base:RayWorkerGroup.execute_all_async",
        provider="verl_patches.trainer.dispatch:put_before_calling",
        why="verl serialises each worker's arguments in that worker's own call (execute_all_async), at 54c9b736 also a "
        "batch that all ranks of a replica share: the last worker starts when all others have been served.",
        exit="verl puts every large argument into Ray's store once, before it calls the first worker",
    ),
    PatchSpec(
        id="dispatch.note_starts",
        stage="dispatch",
        kind="wrap",
        processes=_WORKER,
        target="verl.single_controller.base.decorator:register",
        provider="verl_patches.trainer.worker_starts:record_starts",
        bindings=(
            "verl.single_controller.base.worker:register",
            f"{_WORKERS}:register",
            "verl.workers.fsdp_workers:register",
        ),
        why="How far apart workers start is known in the workers only, and verl does not look.",
        exit=_NEVER,
    ),
)

FUNCTIONAL: tuple[PatchSpec, ...] = (
    *CONTROLLER,
    *DISPATCH,
    *MODEL,
    *a3_rows.ROWS,
    *RESHARD,
    *ROLLOUT,
    *UPDATE,
    *MEMORY,
)

NO_BUILD: tuple[PatchSpec, ...] = (_flash_attn("flash_attn"), _flash_attn("flash_attn.bert_padding"))

STAND_INS: tuple[PatchSpec, ...] = cpu_rows.ROWS

ROWS: tuple[PatchSpec, ...] = (*FUNCTIONAL, *NO_BUILD, *STAND_INS)
