"""Build real Megatron GPTModels rank by rank and say what they hold, in a process of its own.

Megatron's own initialize_model_parallel forms the groups, on torch's fake backend, which pretends that the other ranks
exist. Two more liberties, neither of which holds parameters: an attention core that does nothing (Megatron's refuses
MLA without Transformer Engine), and "cpu" as the rotary table's device (it asks for CUDA).
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.cuda.current_device = lambda: "cpu"


SETTINGS = dict(
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, qk_layernorm=True,
    moe_token_dispatcher_type="allgather",  # the other one opens a CUDA stream
    gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
    bias_activation_fusion=False, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
    use_cpu_initialization=True,
)  # fmt: skip


class NoCore(torch.nn.Module):
    """An attention core without parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def megatron_config(case: dict) -> MLATransformerConfig:
    hf = case["config"]
    dense = hf["first_k_dense_replace"]
    first, last = case["layers"] or (None, None)
    same = "hidden_size num_attention_heads q_lora_rank kv_lora_rank v_head_dim".split()
    config = MLATransformerConfig(
        **{name: hf[name] for name in same},
        **SETTINGS,
        num_layers=hf["num_hidden_layers"],
        ffn_hidden_size=hf["intermediate_size"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        num_moe_experts=hf["n_routed_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_layer_freq=[int(layer >= dense) for layer in range(hf["num_hidden_layers"])],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        tensor_model_parallel_size=case["tp"],
        context_parallel_size=case["cp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"] if case["vpp"] > 1 else None,
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"],
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        sequence_parallel=case["tp"] > 1,
    )
    config.sequence_parallel = False  # required with EP and TP, refused by the torch norm; no shape depends on it
    return config


def build_chunk(config: MLATransformerConfig, vocab_size: int) -> GPTModel:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = NoCore
    return GPTModel(
        config,
        spec,
        vocab_size=vocab_size,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def of_chunk(model: GPTModel) -> dict:
    """What the model says of itself, in training's dtypes: all cast, then each router's bias put back to fp32."""
    model.bfloat16()
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    tensors = dict(model.named_parameters())
    tensors |= {name: t for name, t in model.named_buffers() if name.endswith("expert_bias")}
    experts = [m.local_expert_indices for m in model.modules() if isinstance(m, MoELayer)]
    return {
        "tensors": {
            name: [list(t.shape), str(t.dtype).removeprefix("torch."), getattr(t, "partition_dim", None)]
            for name, t in tensors.items()
        },
        "layers": [layer.layer_number - 1 for layer in model.decoder.layers],
        "experts": experts[0] if experts else None,
        "first_word": model.embedding.word_embeddings.vocab_start_index if model.pre_process else None,
    }


GROUPS = {
    "tp": "tensor_model_parallel", "cp": "context_parallel", "dp": "data_parallel", "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel", "etp": "expert_tensor_parallel", "edp": "expert_data_parallel",
}  # fmt: skip


def groups() -> dict:
    group_of = {name: getattr(parallel_state, f"get_{long}_group") for name, long in GROUPS.items()}
    return {name: dist.get_process_group_ranks(group()) for name, group in group_of.items()}


def run_case(case: dict) -> list[dict]:
    rows = []
    for rank in case["ranks"]:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["world_size"])
        parallel_state.initialize_model_parallel(
            case["tp"],
            case["pp"],
            case["vpp"] if case["vpp"] > 1 else None,
            context_parallel_size=case["cp"],
            expert_model_parallel_size=case["ep"],
            expert_tensor_parallel_size=case["etp"],
            create_gloo_process_groups=False,
        )
        chunks = []
        for chunk in range(case["vpp"]):
            if case["vpp"] > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            chunks.append(of_chunk(build_chunk(megatron_config(case), case["config"]["vocab_size"])))
        rows.append({"rank": rank, "groups": groups(), "chunks": chunks})
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return rows


def held(cases: dict[str, dict]) -> dict[str, list[dict]]:
    """{name: rows}; a case: {config: HF config, tp, cp, pp, vpp, ep, etp, world_size, ranks, layers}.

    layers: None or [first, last], each a count or None. A row, of a rank: {rank, groups: {name: ranks}, chunks:
    [{tensors: {name: [shape, dtype, cut axis]}, layers, experts, first_word}]}.
    """
    return {name: run_case(case) for name, case in cases.items()}
