"""List everything that is replaced upstream in one table: rows of the start, then of a GRPO step in its order.

    controller, dispatch, model -> reshard -> rollout -> reward -> log-probs -> advantage -> update, memory, checkpoint

Last come stand-ins for packages that have no build for NPUs. A platform without a device also has the rows of
platform.load_emulation(). A row's fields, which patching/spec.py explains, are id, kind, target, provider, why, exit.
"""

from __future__ import annotations

import functools
from typing import Any

from verl_patches.patching.spec import PROCESSES, PatchSpec
from verl_patches.platform import NO_DEVICE, load_emulation

_MINDSPEED = "verl_patches.model.mindspeed"
_WORKERS = "verl.workers.megatron_workers"
_ACTOR = f"{_WORKERS}:ActorRolloutRefWorker"
_CRITIC = f"{_WORKERS}:CriticWorker"
_TRAINER = "verl.trainer.ppo.ray_trainer"
_MANAGER = "verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager"
_REGISTRY = "verl.models.mcore.registry"
_VOCAB_PARALLEL = "verl.utils.megatron.tensor_parallel"
_PYPI, _A3 = frozenset({"pypi"}), frozenset({"a3"})
_CONTROLLER, _WORKER, _ALL = frozenset({"controller"}), frozenset({"worker"}), frozenset(PROCESSES)
_NO_EXIT = "none: it is what this recipe adds to verl"
_NEWER_MEGATRON = "the pins move to a megatron-core that has it (0.12 has)"
_VERL_HAS_IT = "verl has a DeepSeek-V3 on MindSpeed-LLM"
_PACKED_PARAMS_HOLDERS = (
    "verl.models.mcore.util", "megatron.core.models.gpt.gpt_model",
    "megatron.core.transformer.custom_layers.transformer_engine", "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.transformer_block", "mindspeed.core.models.gpt.gpt_model",
    "mindspeed.core.pipeline_parallel.fb_overlap.gpt_model", "mindspeed.core.transformer.transformer_block",
    "mindspeed_llm.core.models.gpt.gpt_model", "mindspeed_llm.core.pipeline_parallel.dualpipe.gpt_model",
    "mindspeed_llm.core.transformer.dot_product_attention", "mindspeed_llm.core.transformer.transformer_block",
    "mindspeed_llm.tasks.models.transformer.multi_token_predication",
    "mindspeed_llm.tasks.posttrain.trl_ppo.actor_model",
)  # fmt: skip

_GROUP_INIT_HOLDERS = (
    "vllm.distributed:init_model_parallel_group",
    "vllm.spec_decode.smaller_tp_proposer_worker:init_model_parallel_group",
    "verl.third_party.vllm.vllm_v_0_5_4.parallel_state:init_model_parallel_group",
    "verl.third_party.vllm.vllm_v_0_6_3.parallel_state:init_model_parallel_group",
)  # fmt: skip


def _row(
    id: str, kind: str, target: str, provider: str, why: str, exit: str = _NO_EXIT, processes=_WORKER, **more: Any
) -> PatchSpec:
    """Return a row for workers unless `processes` is given; a row that names a feature has the role "feature"."""
    role = "feature" if "feature" in more else "correctness"
    return PatchSpec(id, target, kind, provider, why, exit, processes=processes, **{"role": role, **more})


_a3 = functools.partial(_row, lines=_A3)
_ascend = functools.partial(_a3, platforms=frozenset({"npu"}))  # vllm-ascend's own classes

ROLLOUT: tuple[PatchSpec, ...] = (
    _row("rollout.engine", "subclass", "vllm.entrypoints.llm:LLM", "verl_patches.worker.rollout_engine:RolloutEngine",
         "Phases of the step begin where the engine wakes, generates and sleeps; verl 0.4.0 and 54c9b736 call it at "
         "different places.",
         bindings=("vllm:LLM", "vllm.benchmarks.latency:LLM",
                   "mindspeed_llm.tasks.posttrain.rejection_sampling.rejection_sampling:LLM@a3",
                   "verl.third_party.vllm:LLM", "verl.third_party.vllm.vllm_v_0_5_4.llm:LLM",
                   "verl.third_party.vllm.vllm_v_0_6_3.llm:LLM",
                   "verl.workers.rollout.vllm_rollout.vllm_rollout:LLM",
                   "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:LLM",
                   "verl.workers.sharding_manager.fsdp_vllm:LLM", "verl.workers.sharding_manager.megatron_vllm:LLM")),
    _row("rollout.llm_arguments", "override", "vllm.entrypoints.llm:LLM.__init__",
         "verl_patches.worker.rollout_engine:RolloutEngine.__init__",
         "verl 0.4.0 passes limit_mm_per_prompt=None and disable_mm_preprocessor_cache=True for text models too; vLLM "
         "0.9.1 wants a dict for the first and refuses the second (vllm.config.ModelConfig._init_multimodal_config). "
         "And vLLM reads the model folder, not verl's override of it: DeepSeek's config.json says fp8, which is not in "
         "vllm_ascend.platform.NPUPlatform.supported_quantization, also after conversion to bf16.",
         exit="verl passes image arguments only to models that take images, and its override_config to vLLM",
         needs=("rollout.engine",)),
    _row("rollout.no_collector", "override", "vllm.entrypoints.llm:LLM.generate",
         "verl_patches.worker.rollout_engine:RolloutEngine.generate",
         "Python's garbage collector runs during decode steps, at different times on each rank, and all ranks of an "
         "instance wait for the slowest.",
         exit="vLLM freezes the collector while it decodes", needs=("rollout.engine",), role="speed"),
    _row("rollout.dp_place", "wrap", "vllm.config:ParallelConfig.__post_init__",
         "verl_patches.rollout.engine:set_dp_rank_in_launcher",
         "With external_launcher and data_parallel_size > 1 vLLM 0.9.1 makes every process DP rank 0 with a port of "
         "its own, so DP ranks never meet.",
         exit="vLLM derives DP rank and meeting point from the launcher when engines are started from outside"),
    _row("rollout.fp32_router", "wrap", "vllm.model_executor.models.deepseek_v2:DeepseekV2MoE.__init__",
         "verl_patches.rollout.engine:route_in_fp32",
         "vLLM 0.9.1 routes in the model's dtype, training and the checkpoint's bias are fp32: in bf16 near scores "
         "change places and tokens go to other experts than in training.",
         exit="vLLM routes DeepSeek-V3 in fp32", platforms=frozenset({"cpu"})),  # on npu: rollout.ascend_fp32_router
    _ascend("rollout.ascend_fp32_router", "wrap", "vllm_ascend.models.deepseek_v2:CustomDeepseekV2MoE.__init__",
            "verl_patches.rollout.engine:route_in_fp32",
            "vllm-ascend's class has router weight and correction bias in the model's dtype too, and gives "
            "npu_moe_gating_top_k bf16 logits and bias: as rollout.fp32_router.",
            exit="vllm-ascend routes DeepSeek-V3 in fp32"),
    _ascend("rollout.ascend_decode_kv", "wrap", "vllm_ascend.attention.mla_v1:AscendMLAImpl.forward",
            "verl_patches.rollout.ascend:write_decode_kv",
            "With torchair a batch of decodes and prefills, which V1's own scheduler makes, never writes the decode "
            "tokens' KV: later tokens are silently wrong (|dlogp| 2.2, a tiny model). A prompt of one token counts as "
            "a decode: among new prompts, the keys of the others alone are written to the slots of all tokens.",
            exit="vllm-ascend PR 1748 (torchair_graph bugfix when chunked_prefill is true) is in the pin"),
    _ascend("rollout.ascend_top_k_top_p", "wrap",
            "vllm_ascend.patch.worker.patch_common.patch_sampler:_apply_top_k_top_p",
            "verl_patches.rollout.ascend:reorder_top_k_top_p",
            "With VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE=1 top-k is taken for top-p and the other way round: defined as "
            "(logits, p, k), called with (logits, k, p) by the module's topk_topp_forward_native. A top-p below 1 "
            "becomes a count of 0, whose index is past the vocabulary, and no token is left out.",
            exit="the pin takes (logits, k, p), as AscendTopKTopPSampler of newer versions does"),
    _ascend("rollout.ascend_expert_groups", "replace", "vllm_ascend.ops.fused_moe:native_grouped_topk",
            "verl_patches.rollout.ascend:rank_groups_by_two",
            "Unless there are 256 experts, which npu_moe_gating_top_k routes, vllm-ascend ranks groups by their best "
            "expert; DeepSeek-V3 sums the best two, as vLLM does since PR 13474.",
            exit="vllm-ascend ranks groups by their best two experts where there is a correction bias"),
    _row("rollout.absorb_mla_again", "wrap",
         "vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM.load_weights",
         "verl_patches.rollout.engine:refresh_absorbed_mla",
         "vLLM's MLA derives the projections that it decodes with from kv_b_proj at start; as views they follow a "
         "weight sync. vllm_ascend.attention.mla_v1.AscendMLAImpl.process_weights_after_loading copies them, and "
         "MindSpeed makes torch.Tensor.view copy (mindspeed.megatron_adaptor.torch_adaptation): decoding would keep "
         "the first weights.",
         exit="vLLM derives them again when weights are loaded, or MindSpeed leaves torch.Tensor.view alone",
         lines=_A3),
    _ascend("rollout.ascend_mc2_groups", "wrap", "vllm.distributed.parallel_state:init_model_parallel_group",
            "verl_patches.platform.npu.groups:add_mc2_groups",
            "CANN demands a communicator for MC2 on which no other operator runs; vllm-ascend gives MC2 in decode "
            "that of vLLM's EP group, on which vllm_ascend.ops.fused_moe.fused_experts_with_all2all runs prefills.",
            exit="vllm-ascend PRs 1711 (get_mc2_group) and 1831 (several instances) are in the pin, as in v0.9.1rc2",
            bindings=_GROUP_INIT_HOLDERS),
    _ascend("rollout.ascend_mc2_name", "wrap", "vllm_ascend.ops.fused_moe:AscendUnquantizedFusedMoEMethod.__init__",
            "verl_patches.platform.npu.groups:use_mc2_group",
            "The method gives MC2's ops, in graphs too, the communicator of vLLM's EP group, on which prefills run. "
            "Methods of quantised experts do so too, but are not covered: weights are not synced to such experts.",
            exit="as rollout.ascend_mc2_groups", needs=("rollout.ascend_mc2_groups",)),
    _ascend("rollout.ascend_small_groups", "wrap", "vllm.distributed.parallel_state:init_model_parallel_group",
            "verl_patches.platform.npu.groups:rollout_group_options",
            "vLLM makes its device groups without options (vllm.distributed.parallel_state.GroupCoordinator.__init__), "
            "so that each holds two buffers of HCCL_BUFFSIZE, which the experts' exchange sizes; "
            "recipe.hccl.small_groups_mib is for the others, among them the EP group where MC2 has its own.",
            exit="vLLM takes options of groups", bindings=_GROUP_INIT_HOLDERS,
            needs=("rollout.ascend_mc2_groups", "rollout.ascend_mc2_name"), feature="small_groups"),
    _ascend("rollout.ascend_dp_sync", "wrap", "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests_dp",
            "verl_patches.rollout.ascend:share_dp_metadata",
            "DP ranks all-reduce twice in a decode step, 3 ms each in the published run: whether any has requests "
            "(vllm_ascend.patch.platform.patch_common.patch_distributed.ascend_has_unfinished_dp), and their most "
            "tokens (target of rollout.ascend_dp_metadata), 0 where none has.",
            exit="vllm-ascend's metadata says whether a rank has requests", needs=("rollout.ascend_dp_metadata",),
            role="speed"),
    _ascend("rollout.ascend_dp_metadata", "wrap",
            "vllm_ascend.worker.model_runner_v1:NPUModelRunner._get_forward_metadata_across_dp",
            "verl_patches.rollout.ascend:reuse_dp_metadata",
            "share_dp_metadata did the all-reduce of a rank without requests; its dummy batch would start another.",
            exit="as rollout.ascend_dp_sync", role="speed"),
    _row("rollout.keep_log_probs", "wrap",
         "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
         "verl_patches.step.log_probs.rollout_log_probs:keep_rollout_log_probs",
         "verl 54c9b736 has vLLM compute the log-probs of sampled tokens (vLLMRollout.__init__) and drops them; the "
         "truth check compares them with the actor's, on both lines with recipe.logprob_check.every those of "
         "sequences that are sampled for it while vLLM is awake.", role="observe"),
)  # fmt: skip

MODEL: tuple[PatchSpec, ...] = (
    _row("model.family_config", "wrap", "transformers.models.auto.configuration_auto:AutoConfig.from_pretrained",
         "verl_patches.layout.model_folder:class_of_family",
         "transformers 4.52 does not know model_type kimi_k2, and may run a class that is code of the model's folder.",
         exit="transformers knows kimi_k2, and prefers its own classes", processes=_ALL),
    _row("model.trusted_tokenizer", "wrap", "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",
         "verl_patches.worker.remote_code:load_if_trusted",
         "verl passes trust_remote_code in some calls alone, and transformers then asks on the terminal; it writes a "
         "copy of a tokenizer's code in place: 1 of 45 starts of 16 processes failed.",
         exit="verl passes one setting, and transformers replaces the copy", processes=_ALL, feature="remote_code"),
    _row("model.config", "register", f"{_REGISTRY}:MODEL_CONFIG_CONVERTER_REGISTRY",
         "verl_patches.model.megatron:converters",
         "verl.models.mcore.config_converter.hf_to_mcore_config_dpskv3 drops group-limited routing, computes the "
         "router in fp64, trains with a balancing loss and lets training move the correction bias.",
         exit="verl sets moe_router_num_groups and moe_router_group_topk for DeepSeek-V3", lines=_PYPI),
    _row("model.mla_k_pe_grad", "wrap", "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
         "verl_patches.model.megatron:sum_k_pe_grad",
         "Under TP the class's get_query_key_value_tensors keeps on each rank only its own heads' part of the rotary "
         "key's gradient (verl.models.mcore.patch_v012.apply_patch has a copy).",
         exit="megatron-core sums the gradient of k_pos_emb over TP ranks", lines=_PYPI),
    _row("model.load_hf", "wrap", "verl.utils.model:load_megatron_gptmodel_weights",
         "verl_patches.worker.models:load_deepseekv3",
         "verl loads HF weights into Megatron for Llama and Qwen2 only "
         "(verl.models.weight_loader_registry.get_weight_loader), through a whole HF model on every rank, twice.",
         exit="verl loads DeepSeek-V3 safetensors into Megatron",
         bindings=(f"{_WORKERS}:load_megatron_gptmodel_weights",)),
    _row("model.train_dtype", "override", f"{_ACTOR}._build_model_optimizer",
         "verl_patches.worker.recipe_worker:RecipeWorker._build_model_optimizer",
         "init_model of verl's Megatron worker sets the dtype to bfloat16; only fp32 shows a wrong weight.",
         exit="verl reads the actor's dtype from its configuration",
         needs=("update.recipe_worker", "model.optimizer_dtype")),
    _row("model.value_head", "register", f"{_REGISTRY}:MODEL_INITIALIZER_REGISTRY",
         "verl_patches.model.value_head:initializers",
         "verl's head of a critic (verl.models.llama.megatron.layers.parallel_linear.LinearForLastLayer) imports "
         "flash_attn and, under sequence parallelism, marks its weight but not its bias for the sum of gradients over "
         "TP ranks, so biases drift apart.", feature="value_models",
         exit="verl has a value head of its own for Megatron", lines=_PYPI),  # line a3: model.mindspeed_initializer
    _row("model.optimizer_dtype", "wrap", "verl.utils.megatron.optimizer:get_megatron_optimizer",
         "verl_patches.model.megatron:optimizer_in_model_dtype",
         "verl.utils.megatron_utils.init_megatron_optim_config says bf16 whatever the model is.",
         exit="verl derives the optimizer's dtype from the model's"),
)  # fmt: skip

# DeepSeek-V3 of MindSpeed-LLM 2.0.0 on Megatron core_r0.8.0, for verl 54c9b736
MINDSPEED: tuple[PatchSpec, ...] = (
    _a3("model.mla_config_name", "extend", "megatron.core.transformer:MLATransformerConfig",
        f"{_MINDSPEED}.compat:MLATransformerConfig",
        "verl imports it (verl.models.mcore.config_converter); core_r0.8.0 has no MLA", exit=_NEWER_MEGATRON),
    _a3("model.block_spec_name", "extend", "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec",
        f"{_MINDSPEED}.compat:get_gpt_decoder_block_spec",
        "verl imports it for its other models (verl.models.mcore.model_initializer)", exit=_NEWER_MEGATRON),
    _a3("model.packed_fields", "wrap", "megatron.core.packed_seq_params:PackedSeqParams",
        f"{_MINDSPEED}.compat:add_padded_lengths",
        "verl.models.mcore.util.preprocess_packed_seqs gives it lengths with padding; core_r0.8.0 has no such fields",
        exit=_NEWER_MEGATRON, bindings=tuple(f"{module}:PackedSeqParams" for module in _PACKED_PARAMS_HOLDERS)),
    *(_a3(f"model.etp_{name}", "extend", f"megatron.core.parallel_state:get_expert_tensor_parallel_{name}",
          f"{_MINDSPEED}.compat:expert_tensor_parallel_{name}",
          "verl calls it (verl.workers.sharding_manager.megatron_vllm); core_r0.8.0 has no such groups",
          exit=_NEWER_MEGATRON) for name in ("world_size", "rank", "group")),
    _a3("model.mindspeed_config", "register", f"{_REGISTRY}:MODEL_CONFIG_CONVERTER_REGISTRY",
        f"{_MINDSPEED}.model:converters",
        "verl's DeepSeek-V3 converter raises NotImplementedError "
        "(verl.models.mcore.config_converter.hf_to_mcore_config_dpskv3)", exit=_VERL_HAS_IT),
    _a3("model.mindspeed_initializer", "register", f"{_REGISTRY}:MODEL_INITIALIZER_REGISTRY",
        f"{_MINDSPEED}.model:initializers",
        "verl builds Megatron's attention; MLA is in mindspeed_llm.tasks.models.spec.deepseek_spec", exit=_VERL_HAS_IT),
    _a3("model.packed_forward", "register", f"{_REGISTRY}:MODEL_FORWARD_REGISTRY",
        "verl_patches.step.batches.packed_forward:forward_registry",
        "verl.models.mcore.util.preprocess_packed_seqs cuts sequences for ring attention, which MindSpeed-LLM's MLA "
        "does not have; and verl's gather of log-probs over CP ranks lacks the factor CP in backward.",
        exit="verl cuts for Ulysses"),
    _a3("model.mindspeed_converter", "register", f"{_REGISTRY}:MODEL_WEIGHT_CONVERTER_REGISTRY",
        "verl_patches.worker.models:weight_converters",
        "verl has no DeepSeek-V3 names at this commit", exit=_VERL_HAS_IT),
    _a3("model.saver_name", "wrap", "verl.models.weight_loader_registry:get_weight_saver",
        f"{_MINDSPEED}.compat:without_deepseekv3_saver",
        "MegatronCheckpointManager.__init__ of every worker looks its model's saver up, saving or not; there is none "
        "for DeepSeek-V3", exit="our own checkpoints take this place",
        bindings=("verl.utils.checkpoint.megatron_checkpoint_manager:get_weight_saver",)),
    _a3("model.packed_rope", "wrap",
        "megatron.core.models.common.embeddings.rotary_pos_embedding:apply_rotary_pos_emb_thd",
        f"{_MINDSPEED}.compat:packed_rope",
        "mindspeed_llm.tasks.models.transformer.multi_head_latent_attention.MultiHeadLatentAttention hands over "
        "[T, 1, N, D], which it takes for [T, N, D]", exit="MindSpeed-LLM's MLA takes packed sequences"),
    _a3("model.mindspeed_weights", "wrap", "verl.utils.megatron_utils:per_tensor_generator",
        "verl_patches.worker.models:deepseekv3_generator",
        "it reads fields that core_r0.8.0's TransformerConfig lacks, knows no stacked experts and leaves out the "
        "correction bias", exit="our own resharder takes this place",
        bindings=("verl.workers.sharding_manager.megatron_vllm:per_tensor_generator",
                  "verl.workers.sharding_manager.megatron_sglang:per_tensor_generator")),
    _a3("update.engine_start", "override", f"{_ACTOR}.__init__",
        "verl_patches.worker.recipe_worker:RecipeWorker.__init__",
        "verl calls initialize_model_parallel with an argument that core_r0.8.0 lacks, and knows no arguments of "
        "MindSpeed", exit="verl starts MindSpeed", needs=("update.recipe_worker",)),
    _ascend("update.small_groups", "wrap", "mindspeed_llm.core.parallel_state:get_nccl_options_wrapper",
            "verl_patches.platform.npu.groups:training_group_options",
            "MindSpeed-LLM's options of Megatron's groups hold a name only, in place of MindSpeed's with a size "
            "(mindspeed.core.parallel_state.get_nccl_options_wrapper): as rollout.ascend_small_groups.",
            exit="MindSpeed-LLM hands on --hccl-group-buffer", feature="small_groups"),
    _a3("update.optimizer_config", "wrap", "verl.utils.megatron_utils:init_megatron_optim_config",
        f"{_MINDSPEED}.start:optimizer_config_from_arguments",
        "verl hands over lr, clip and decay only, in bf16 always",
        exit="verl hands Megatron's optimizer all of its settings"),
    _a3("update.lr_schedule", "wrap", "verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy",
        f"{_MINDSPEED}.start:step_lr_schedule",
        "verl has no learning-rate schedule for Megatron at this commit (a TODO of verl.utils.megatron.optimizer)",
        exit="verl steps Megatron's scheduler (0.4.1 and later)"),
)  # fmt: skip

CONTROLLER: tuple[PatchSpec, ...] = (
    _row("dispatch.send_switches", "wrap", "ray._private.worker:init",
         "verl_patches.trainer.worker_settings:send_switches",
         "Variables of the driver's shell do not reach nodes where `ray start` ran without them: their workers would "
         "run other patches than the driver means.", processes=_CONTROLLER, bindings=("ray:init",)),
    _row("update.recipe_by_default", "wrap", f"{_TRAINER}:RayPPOTrainer.__init__",
         "verl_patches.import_alone:recipe_by_default",
         "verl's own entry point composes no `recipe:`, which rows of controller and workers read.",
         processes=_CONTROLLER),
    _row("data.checked_rows", "wrap", "verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize",
         "verl_patches.step.rows:check_rl_rows",
         "verl meets a null content or extra_info in the middle of a run, and trains on gold answers that never score.",
         exit="verl checks all rows before workers start", processes=_CONTROLLER),
    _row("update.fit_as_run", "wrap", f"{_TRAINER}:RayPPOTrainer.fit", "verl_patches.trainer.run:fit_as_run",
         "Worker handshake before step 1 (rows active, equal digests), record or replay of rollouts, summary.json.",
         processes=_CONTROLLER, needs=("update.recipe_worker",)),
    _row("update.log_with_run", "wrap", "verl.utils.tracking:Tracking.log", "verl_patches.trainer.run:log_with_run",
         "One place sees every step's metrics: phase table, summary.json and the log-prob check.",
         processes=_CONTROLLER, role="observe"),
    _row("reward.pass_at_k", "wrap", "verl.trainer.ppo.metric_utils:process_validation_metrics",
         "verl_patches.trainer.validation:with_pass_at_k",
         "verl's best@k of a validation draws k responses with replacement, which is below pass@k.", role="observe",
         exit="verl has pass@k", processes=_CONTROLLER, bindings=(f"{_TRAINER}:process_validation_metrics",)),
)  # fmt: skip

RESHARD: tuple[PatchSpec, ...] = (
    _row("update.sharding_manager", "subclass", _MANAGER, "verl_patches.worker.sharding:RecipeShardingManager",
         "Counts weight sync as a phase, and can leave it out after the first step: the control run without sync.",
         needs=("rollout.engine",)),
    _row("reshard.direct", "override", f"{_MANAGER}.__enter__",
         "verl_patches.worker.sharding:RecipeShardingManager.__enter__",
         "verl gives every rank every weight, tensor by tensor (verl.utils.megatron_utils.per_tensor_generator): "
         "at 256 dies 1.3 TB, where a rank lacks 24.95 GB, and needs room for all experts of a layer; vLLM searches "
         "44,544 expert names one by one; and weights that nothing proves to be written cannot be freed at sleep.",
         exit="verl sends each rank what it lacks", needs=("update.sharding_manager", "update.recipe_worker")),
    _row("model.local_names", "wrap", "verl.utils.model:normalize_model_name",
         "verl_patches.reshard.parameters:te_names_for_verl",
         "verl's per_tensor_generator and verl.models.mcore.weight_converter.McoreToHFWeightConverterDpskv3 know "
         "Transformer Engine's parameter names only.",
         exit="verl accepts the names of Megatron's own modules", lines=_PYPI,
         bindings=("verl.utils.megatron_utils:normalize_model_name",)),
)  # fmt: skip

LOG_PROB: tuple[PatchSpec, ...] = (
    _row("logprob.in_chunks", "replace", f"{_VOCAB_PARALLEL}:vocab_parallel_log_probs_from_logits",
         "verl_patches.model.log_prob:vocab_parallel_log_probs_from_logits",
         "megatron.core.tensor_parallel.cross_entropy.VocabParallelCrossEntropy overwrites in place, by their softmax, "
         "the fp32 logits that verl's entropy saved for backward: a loss with entropy fails there. MindSpeed's copies "
         "them, as Megatron's does in bf16: 0.53 GB of fp32 for 4096 tokens at TP4.",
         exit="verl computes log-probs of vocab-parallel logits by chunks, on NPUs too",
         bindings=("verl.workers.actor.megatron_actor:vocab_parallel_log_probs_from_logits",)),
    _row("logprob.entropy_in_chunks", "replace", f"{_VOCAB_PARALLEL}:vocab_parallel_entropy",
         "verl_patches.model.log_prob:vocab_parallel_entropy",
         "verl's holds softmax and its product with the logits, each as large as these, and keeps one for backward.",
         exit="as logprob.in_chunks", needs=("logprob.in_chunks",),
         bindings=("verl.workers.actor.megatron_actor:vocab_parallel_entropy",)),
)  # fmt: skip

ADVANTAGE: tuple[PatchSpec, ...] = (
    _row("advantage.objective", "wrap", f"{_TRAINER}:compute_advantage",
         "verl_patches.step.objectives.advantages:objective_advantages",
         "verl's Megatron trainer has no loss of fixed responses; with these advantages its own update has the "
         "gradient of each of them (docs/data.md).", processes=_CONTROLLER, feature="fixed_data"),
)  # fmt: skip

UPDATE: tuple[PatchSpec, ...] = (
    _row("update.recipe_worker", "subclass", _ACTOR, "verl_patches.worker.recipe_worker:RecipeWorker",
         "The step of a worker is written down in one class: phases of memory, weight sync, on-policy update, tensors "
         "that stay on the device, handshake and report.", processes=_ALL, needs=("update.recipe_by_default",)),
    _row("update.recipe_critic", "subclass", _CRITIC, "verl_patches.worker.value_worker:RecipeCriticWorker",
         "The step of a critic: the recipe's dtype where verl's init_model sets bfloat16, its phases of memory, its "
         "part of a checkpoint, where verl loses experts, and steps with NaN left out.",
         exit="as update.recipe_worker", processes=_ALL, needs=("update.recipe_worker",), feature="critic"),
    _row("update.critic_gradients", "override", f"{_CRITIC}._build_critic_model_optimizer",
         "verl_patches.worker.value_worker:RecipeCriticWorker._build_critic_model_optimizer",
         "verl.workers.actor.megatron_actor.MegatronPPOActor gives Megatron's schedules finalize_model_grads, verl's "
         "critic does not: nothing reduces gradients over ranks, and each rank steps with its own.", feature="critic",
         exit="verl's critic sets finalize_model_grads_func", needs=("update.recipe_critic",), role="correctness"),
    _row("update.on_policy", "override", f"{_ACTOR}.update_actor",
         "verl_patches.worker.recipe_worker:RecipeWorker.update_actor",
         "verl computes old log-probs in a pass of its own (verl.trainer.ppo.ray_trainer.RayPPOTrainer.fit) also "
         "where the update finds the same ones, and never corrects for vLLM's different log-probs.",
         exit="the pins move to a verl with algorithm.rollout_correction that leaves the pass out on policy "
              "(verl 3996)",
         needs=("update.recipe_worker", "update.loss_on_policy"), feature="on_policy"),
    _row("update.loss_on_policy", "wrap", "verl.trainer.ppo.core_algos:compute_policy_loss",
         "verl_patches.step.log_probs.policy_update:replace_old_log_probs",
         "verl's loss takes the batch's old log-probs, which on policy nothing computes: the update gives its own.",
         exit="as update.on_policy", bindings=("verl.workers.actor.megatron_actor:compute_policy_loss",
                                               "verl.workers.actor.dp_actor:compute_policy_loss"), feature="on_policy"),
    _row("update.routing_samples", "wrap", "verl.models.mcore.util:preprocess_packed_seqs",
         "verl_patches.step.replay.routing_replay:attach_micro_batch",
         "Layers get packed tokens and never which samples they are of; PackedSeqParams reach each layer, also when it "
         "is recomputed (megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward).",
         exit="verl has routing replay for Megatron (0.6 and later has)",
         bindings=("verl.models.mcore.model_forward:preprocess_packed_seqs",), feature="routing_replay"),
    _row("update.routing_replay", "wrap", "megatron.core.transformer.moe.moe_utils:topk_softmax_with_capacity",
         "verl_patches.step.replay.routing_replay:replay_experts",
         "The experts of a token in the update are those that the new weights choose, not those of the pass "
         "whose log-probs it is compared with. The function is the only place that selects.",
         exit="megatron-core replays recorded experts (RouterReplay of later versions)", lines=_PYPI,
         needs=("update.routing_samples",),
         bindings=("megatron.core.transformer.moe.router:topk_softmax_with_capacity",), feature="routing_replay"),
    _a3("update.routing_replay_mindspeed", "wrap",
        "mindspeed_llm.core.transformer.moe.moe_utils:topk_softmax_with_capacity",
        "verl_patches.step.replay.routing_replay:replay_experts",
        "As update.routing_replay; MindSpeed-LLM has a selection of its own.",
        exit="MindSpeed-LLM replays recorded experts", needs=("update.routing_samples",),
        bindings=("mindspeed_llm.core.transformer.moe.router:topk_softmax_with_capacity",
                  "mindspeed_llm.core:topk_softmax_with_capacity"), feature="routing_replay"),
    _row("update.skip_bad_steps", "override", f"{_ACTOR}._build_model_optimizer",
         "verl_patches.worker.recipe_worker:RecipeWorker._build_model_optimizer",
         "In fp32 and bf16 Megatron steps with NaN or infinite gradients too, as only a loss scaler looks at them "
         "(megatron.core.optimizer.optimizer.MixedPrecisionOptimizer.prepare_grads): every weight is NaN afterwards. "
         "Where a scaler leaves a step out, verl.workers.actor.megatron_actor.MegatronPPOActor.update_policy raises "
         "NotImplementedError. Ours leaves such a step out on all ranks, counts it and names the parameter.",
         exit="verl leaves out steps with NaN gradients and counts them", needs=("update.recipe_worker",)),
    _row("update.tensor_cache", "override", f"{_MANAGER}.postprocess_data",
         "verl_patches.worker.sharding:RecipeShardingManager.postprocess_data",
         "Last point where a rank holds only its own responses on the device: verl sends all of it "
         "through the trainer, padded, and back for each stage (verl.single_controller.base.decorator).",
         exit="verl's stages leave their tensors on the workers for the next",
         needs=("update.sharding_manager", "update.recipe_worker"), feature="tensor_cache"),
    _a3("update.dynamic_batches", "wrap", "verl.workers.actor.megatron_actor:MegatronPPOActor.forward_backward_batch",
        "verl_patches.step.batches.micro_batches:pack_micro_batches",
        "verl 54c9b736's Megatron actor knows micro batches of a fixed number of samples only, and returns log-probs "
        "in their order.", feature="dynamic_batches",
        exit="the pins move to verl 0.4.0 or later", needs=("update.dynamic_split", "update.recipe_worker")),
    _a3("update.dynamic_split", "wrap", "verl.utils.torch_functional:split_dict_tensor_into_batches",
        "verl_patches.step.batches.micro_batches:split_by_tokens",
        "The actor's forward_backward_batch cuts a batch by it, into equal parts only.",
        exit="as update.dynamic_batches", feature="dynamic_batches",
        bindings=("verl.workers.actor.megatron_actor:split_dict_tensor_into_batches",
                  "verl.workers.critic.megatron_critic:split_dict_tensor_into_batches",
                  "verl.workers.reward_model.megatron.reward_model:split_dict_tensor_into_batches")),
    _row("update.mini_batches", "wrap", "verl.utils.megatron.pipeline_parallel:make_batch_generator",
         "verl_patches.step.batches.micro_batches:count_mini_batch",
         "agg_loss sees one micro batch; update.sample_weights needs samples and tokens of all in the mini batch.",
         exit="as update.sample_weights", needs=("update.recipe_worker",),
         bindings=("verl.workers.actor.megatron_actor:make_batch_generator",
                   "verl.workers.critic.megatron_critic:make_batch_generator",
                   "verl.workers.reward_model.megatron.reward_model:make_batch_generator")),
    _row("update.sample_weights", "wrap", "verl.trainer.ppo.core_algos:agg_loss",
         "verl_patches.step.batches.micro_batches:scale_micro_batch_loss",
         "The loss of each micro batch is an average of its own, and Megatron averages those "
         "(megatron.core.pipeline_parallel.schedules.forward_step): the gradient depends on the micro batches where "
         "they hold unequally many samples or, with token-mean, tokens.",
         exit="the pins move to a verl whose agg_loss divides by the tokens of the mini batch",
         needs=("update.mini_batches",),
         bindings=("verl.workers.actor.megatron_actor:agg_loss", "verl.workers.actor.dp_actor:agg_loss",
                   f"{_TRAINER}:agg_loss")),
    _row("update.micro_batches_as_planned", "wrap", "verl.utils.seqlen_balancing:rearrange_micro_batches",
         "verl_patches.step.batches.micro_batches:split_as_planned",
         "Dynamic batch size: verl packs rank by rank, above the token budget at times, and the n-th micro batches of "
         "two replicas are not equally long.",
         exit="verl plans dynamic micro batches for all replicas together, within the budget", feature="tensor_cache",
         bindings=("verl.workers.actor.megatron_actor:rearrange_micro_batches@pypi",
                   "verl.workers.actor.dp_actor:rearrange_micro_batches",
                   "verl.workers.critic.megatron_critic:rearrange_micro_batches@pypi",
                   "verl.workers.critic.dp_critic:rearrange_micro_batches",
                   "verl.workers.reward_model.megatron.reward_model:rearrange_micro_batches@pypi")),
)  # fmt: skip

CHECKPOINT: tuple[PatchSpec, ...] = (
    _row("checkpoint.parts", "override", f"{_ACTOR}.save_checkpoint",
         "verl_patches.worker.checkpoint:TrainingWorker.save_checkpoint",
         "verl saves the model on data-parallel rank 0 only "
         "(verl.utils.checkpoint.megatron_checkpoint_manager.MegatronCheckpointManager.save_checkpoint), so experts of "
         "other ranks are lost; gathers a replica's states on one rank; and resumes in the same layout only.",
         exit="verl saves and loads all experts, asynchronously, for any layout", needs=("update.recipe_worker",)),
    _row("checkpoint.save", "wrap", f"{_TRAINER}:RayPPOTrainer._save_checkpoint",
         "verl_patches.trainer.checkpoint:save_as_recipe",
         "verl names a folder as the latest before it is complete: a run that is killed then resumes from half of it.",
         exit="verl names a checkpoint once it is complete", processes=_CONTROLLER,
         needs=("update.fit_as_run", "checkpoint.load")),
    _row("checkpoint.load", "wrap", f"{_TRAINER}:RayPPOTrainer._load_checkpoint",
         "verl_patches.trainer.checkpoint:load_as_recipe",
         "verl does not check that what it resumes from is complete, and of the same model and settings.",
         exit="as checkpoint.save", processes=_CONTROLLER, needs=("update.fit_as_run", "checkpoint.parts")),
)  # fmt: skip

MEMORY: tuple[PatchSpec, ...] = (
    _row("memory.ledger", "override", f"{_ACTOR}.init_model",
         "verl_patches.worker.recipe_worker:RecipeWorker.init_model",
         "verl does not check what is on the device; the ledger compares it with the memory schedule.",
         needs=("update.recipe_worker", "rollout.engine", "memory.order"), role="observe", feature="memory_ledger"),
    _row("memory.order", "override", f"{_ACTOR}.init_model",
         "verl_patches.worker.recipe_worker:RecipeWorker.init_model",
         "verl brings training weights to the host and back around every call, into host memory made anew each time; "
         "at 54c9b736 routed experts stay on the die. Ours is one table (memory/schedule.py).",
         exit="verl moves memory by one table, into host memory that it keeps, and only what was written to",
         needs=("update.recipe_worker", "rollout.engine", "update.sharding_manager", "memory.empty_cache",
                "checkpoint.parts")),
    _row("memory.empty_cache", "wrap", f"{_WORKERS}:torch", "verl_patches.worker.memory:torch_without_empty_cache",
         "verl gives the allocator's pool back after every call, pass and update, and the next stage asks the device "
         "for the same memory again; with memory.order the schedule says where.",
         exit="verl empties the cache where a stage needs memory past torch's pool, and only there", role="speed",
         bindings=("verl.workers.actor.megatron_actor:torch", "verl.workers.critic.megatron_critic:torch")),
    _row("memory.sleep_mode", "override", "vllm.entrypoints.llm:LLM.sleep",
         "verl_patches.worker.rollout_engine:RolloutEngine.sleep",
         "vLLM's sleep mode copies all weights to the host at every sleep, although the weight sync overwrites them, "
         "and takes memory past torch's allocator; a CPU has none. Ours gives the storages' memory back and takes it "
         "again, also with graphs.",
         exit="vLLM drops weights that are to be replaced, at sleep, into torch's pool", needs=("rollout.engine",)),
    _ascend("memory.graph_addresses", "wrap", "vllm_ascend.worker.model_runner_v1:torchair",
            "verl_patches.worker.rollout_engine:torchair_with_live_addresses",
            "NPUModelRunner compiles graphs with frozen_parameter, so Parameters must keep their addresses, which only "
            "vLLM's sleep mode does; memory.sleep_mode frees them to torch's pool.", role="correctness",
            feature="graphs", exit="vllm-ascend has an option for frozen_parameter"),
)  # fmt: skip

DISPATCH: tuple[PatchSpec, ...] = (
    _row("dispatch.put_once", "wrap", "verl.single_controller.ray.base:RayWorkerGroup.execute_all_async",
         "verl_patches.trainer.dispatch:put_before_calling",
         "verl serialises each worker's arguments in its own call: the last starts when all others have been served.",
         exit="verl puts every large argument into Ray's store once, before it calls the first worker",
         processes=_CONTROLLER, role="speed"),
    _row("dispatch.note_calls", "wrap", "verl.single_controller.base.decorator:register",
         "verl_patches.heartbeat.calls:record_calls",
         "Only a worker knows which call it is running, and verl does not record it.",
         bindings=("verl.single_controller.base.worker:register", f"{_WORKERS}:register",
                   "verl.workers.fsdp_workers:register"), role="observe"),
)  # fmt: skip

REWARD: tuple[PatchSpec, ...] = (
    _row("reward.parts", "wrap", "verl.trainer.ppo.reward:load_reward_manager",
         "verl_patches.rewards.manager:load_parts",
         "verl's reward managers know one function, return a reward model's scores in place of its own "
         "(verl.workers.reward_manager.naive.NaiveRewardManager.__call__), and verl.trainer.ppo.reward.compute_reward "
         "prints an error, calls again and trains without extra information.",
         exit="verl adds up several rewards, and ends a run where one of them fails",
         processes=_CONTROLLER, bindings=("verl.trainer.main_ppo:load_reward_manager",)),
    _row("reward.models", "subclass", f"{_WORKERS}:RewardModelWorker",
         "verl_patches.worker.value_worker:RecipeRewardModelWorker",
         "verl has one reward model a run, in bfloat16, and moves its parameters by a copy in each direction "
         "(verl.workers.reward_model.megatron.reward_model.MegatronRewardModel.load_params_to_cuda). Ours are those of "
         "recipe.rewards, one after another by the memory schedule.",
         exit="verl runs several reward models on one worker group", processes=_ALL, needs=("update.recipe_worker",),
         feature="reward_models"),
)  # fmt: skip

FUNCTIONAL: tuple[PatchSpec, ...] = (
    *CONTROLLER, *DISPATCH, *MODEL, *MINDSPEED, *RESHARD, *ROLLOUT, *REWARD, *LOG_PROB, *ADVANTAGE, *UPDATE, *MEMORY,
    *CHECKPOINT,
)  # fmt: skip

PACKAGE_STUBS: tuple[PatchSpec, ...] = tuple(
    _row(f"platform.{module.replace('.', '_')}", "stub", module, "verl_patches.platform.flash_attn",
         "verl.workers.critic.dp_critic imports flash_attn.bert_padding wherever megatron_workers is imported "
         "(verl.workers.actor.dp_actor too where it sees CUDA); flash_attn has no build for NPU or CPU, and "
         "MindSpeed puts an empty module in its place (mindspeed.megatron_adaptor.te_adaptation).",
         exit="verl imports flash_attn where it is used", processes=_ALL)
    for module in ("flash_attn", "flash_attn.bert_padding")
)  # fmt: skip

ROWS: tuple[PatchSpec, ...] = (*FUNCTIONAL, *PACKAGE_STUBS)


def platform_rows(platform: str) -> tuple[PatchSpec, ...]:
    """Return the rows that a run on `platform` may have: this table, and without a device those that emulate one."""
    emulator = load_emulation(platform)
    return ROWS if emulator is None else (*ROWS, *emulator.ROWS)


def all_rows() -> tuple[PatchSpec, ...]:
    """Return the rows of all platforms, for code that reads upstream's source: drift, fingerprints."""
    return platform_rows(NO_DEVICE[0])
