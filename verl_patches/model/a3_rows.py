"""Rows that give verl 54c9b736 a DeepSeek-V3 of MindSpeed-LLM 2.0.0 on Megatron core_r0.8.0 (line a3). No torch."""

from __future__ import annotations

from verl_patches.patching.spec import PatchSpec

_OURS = "verl_patches.model.mindspeed"
_START = "verl_patches.training.engine_worker"
_REGISTRY = "verl.models.mcore.registry"
_WORKERS = "verl.workers.megatron_workers"
_ACTOR = f"{_WORKERS}:ActorRolloutRefWorker"
_VERSION = "the pins move to a megatron-core that has it (0.12 has)"
_MODEL = "verl has a DeepSeek-V3 on MindSpeed-LLM"

_HOLD_PACKED = (
    "verl.models.mcore.util",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.transformer.custom_layers.transformer_engine",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.transformer_block",
    "mindspeed.core.models.gpt.gpt_model",
    "mindspeed.core.pipeline_parallel.fb_overlap.gpt_model",
    "mindspeed.core.transformer.transformer_block",
    "mindspeed_llm.core.models.gpt.gpt_model",
    "mindspeed_llm.core.pipeline_parallel.dualpipe.gpt_model",
    "mindspeed_llm.core.transformer.dot_product_attention",
    "mindspeed_llm.core.transformer.transformer_block",
    "mindspeed_llm.tasks.models.transformer.multi_token_predication",
    "mindspeed_llm.tasks.posttrain.trl_ppo.actor_model",
)

# id, stage, target, kind, provider, bindings, why, exit
_TABLE = (
    ("model.mla_config_name", "model", "megatron.core.transformer:MLATransformerConfig", "extend",
     f"{_OURS}.absent:MLATransformerConfig", (),
     "verl imports it (verl/models/mcore/config_converter.py:22); core_r0.8.0 has no MLA", _VERSION),
    ("model.block_spec_name", "model", "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec", "extend",
     f"{_OURS}.absent:get_gpt_decoder_block_spec", (),
     "verl imports it for its other models (verl/models/mcore/model_initializer.py:20)", _VERSION),
    ("model.packed_fields", "model", "megatron.core.packed_seq_params:PackedSeqParams", "wrap",
     f"{_OURS}.absent:with_padded_lengths", tuple(f"{module}:PackedSeqParams" for module in _HOLD_PACKED),
     "verl gives it lengths with padding (verl/models/mcore/util.py:66); core_r0.8.0 has no such fields", _VERSION),
    ("model.etp_world_size", "model", "megatron.core.parallel_state:get_expert_tensor_parallel_world_size", "extend",
     f"{_OURS}.absent:expert_tensor_parallel_world_size", (),
     "verl asks for it (verl/workers/sharding_manager/megatron_vllm.py:301); core_r0.8.0 has no such groups", _VERSION),
    ("model.etp_rank", "model", "megatron.core.parallel_state:get_expert_tensor_parallel_rank", "extend",
     f"{_OURS}.absent:expert_tensor_parallel_rank", (),
     "verl asks for it (verl/workers/sharding_manager/megatron_vllm.py:302)", _VERSION),
    ("model.etp_group", "model", "megatron.core.parallel_state:get_expert_tensor_parallel_group", "extend",
     f"{_OURS}.absent:expert_tensor_parallel_group", (),
     "verl asks for it (verl/workers/sharding_manager/megatron_vllm.py:303)", _VERSION),
    ("model.mindspeed_config", "model", f"{_REGISTRY}:MODEL_CONFIG_CONVERTER_REGISTRY", "register",
     f"{_OURS}.build:converters", (),
     "verl's DeepSeek-V3 converter raises NotImplementedError (verl/models/mcore/config_converter.py)", _MODEL),
    ("model.mindspeed_initializer", "model", f"{_REGISTRY}:MODEL_INITIALIZER_REGISTRY", "register",
     f"{_OURS}.build:initializers", (),
     "verl builds Megatron's own attention; MLA is MindSpeed-LLM's (deepseek_spec.py)", _MODEL),
    ("model.mindspeed_converter", "model", f"{_REGISTRY}:MODEL_WEIGHT_CONVERTER_REGISTRY", "register",
     f"{_OURS}.sync:weight_converters", (), "verl has no DeepSeek-V3 names at this commit", _MODEL),
    ("model.mindspeed_load_hf", "model", "verl.utils.model:load_megatron_gptmodel_weights", "wrap",
     f"{_OURS}.load:load_deepseekv3", (f"{_WORKERS}:load_megatron_gptmodel_weights",),
     "verl loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py)", _MODEL),
    ("model.saver_name", "model", "verl.models.weight_loader_registry:get_weight_saver", "wrap",
     f"{_OURS}.absent:saver_that_refuses", ("verl.utils.checkpoint.megatron_checkpoint_manager:get_weight_saver",),
     "every worker looks its model's saver up, saving or not; there is none for DeepSeek-V3 "
     "(verl/utils/checkpoint/megatron_checkpoint_manager.py:94)", "our own checkpoints take this place"),
    ("model.packed_rope", "model",
     "megatron.core.models.common.embeddings.rotary_pos_embedding:apply_rotary_pos_emb_thd", "wrap",
     f"{_OURS}.rope:rope_of_packed", (),
     "MindSpeed-LLM's MLA hands over [T, 1, N, D] (multi_head_latent_attention.py:323), which it takes for [T, N, D]",
     "MindSpeed-LLM's MLA takes packed sequences"),
    ("model.mindspeed_weights", "model", "verl.utils.megatron_utils:per_tensor_generator", "wrap",
     f"{_OURS}.sync:generator_by_our_names",
     ("verl.workers.sharding_manager.megatron_vllm:per_tensor_generator",
      "verl.workers.sharding_manager.megatron_sglang:per_tensor_generator"),
     "it reads fields that core_r0.8.0's TransformerConfig lacks, knows no stacked experts and leaves out the "
     "correction bias", "our own resharder takes this place"),
    ("update.engine_start", "update", f"{_ACTOR}.__init__", "override",
     "verl_patches.worker.recipe_worker:RecipeWorker.__init__", (),
     "verl calls initialize_model_parallel with an argument that core_r0.8.0 lacks, and knows no arguments of "
     "MindSpeed (verl/workers/megatron_workers.py:86)", "verl starts MindSpeed"),
    ("update.optimizer_config", "update", "verl.utils.megatron_utils:init_megatron_optim_config", "wrap",
     f"{_START}:optimizer_config_of_arguments", (),
     "verl hands over lr, clip and decay only, in bf16 always (verl/utils/megatron_utils.py:201)",
     "verl hands Megatron's optimizer all of its settings"),
    ("update.lr_schedule", "update", "verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy", "wrap",
     f"{_START}:with_lr_schedule", (),
     "verl has no learning-rate schedule for Megatron at this commit (verl/utils/megatron/optimizer.py, TODO)",
     "verl steps Megatron's scheduler (0.4.1 and later)"),
)  # fmt: skip

ROWS: tuple[PatchSpec, ...] = tuple(
    PatchSpec(
        id=name, stage=stage, target=target, kind=kind, provider=provider, bindings=bindings, why=why, exit=exit,
        lines=frozenset({"a3"}), processes=frozenset({"worker"}),
        needs=("update.recipe_worker",) if kind == "override" else (),
    )
    for name, stage, target, kind, provider, bindings, why, exit in _TABLE
)  # fmt: skip
