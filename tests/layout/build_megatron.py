"""Build real Megatron GPTModels rank by rank, by verl's own path, in a process of its own, and list their tensors.

Megatron's own initialize_model_parallel forms the groups, on torch's fake backend, which pretends that the other ranks
exist. The attention core, which has no parameters, is also replaced: it does nothing (Megatron's own refuses CP).
"""

import functools
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.utils.megatron_utils import unwrap_model

from tests.model.megatron_model import build_model, start_parallel
from verl_patches.layout.parallel import ParallelLayout

GROUPS = {
    "tp": "tensor_model_parallel", "cp": "context_parallel", "dp": "data_parallel", "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel", "etp": "expert_tensor_parallel", "edp": "expert_data_parallel",
}  # fmt: skip
_new_group = dist.new_group


@functools.wraps(_new_group)
def fake_group(ranks=None, *args, **kwargs):
    return _new_group(ranks, backend="fake")


class NoCore(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


def chunk_facts(model) -> dict:
    """Return the facts of a model chunk, after each router has cast its bias back to fp32 as in a forward pass."""
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    tensors = dict(model.named_parameters())
    tensors |= {name: t for name, t in model.named_buffers() if name.endswith("expert_bias")}
    experts = [m.local_expert_indices for m in model.modules() if isinstance(m, MoELayer)]
    return {
        "tensors": {
            name: [list(t.shape), str(t.dtype).removeprefix("torch."), _cut_axis(t)] for name, t in tensors.items()
        },
        "layers": [layer.layer_number - 1 for layer in model.decoder.layers],
        "experts": experts[0] if experts else None,
        "first_word": model.embedding.word_embeddings.vocab_start_index if model.pre_process else None,
    }


def _cut_axis(tensor) -> int | None:
    axis = getattr(tensor, "partition_dim", -1)
    return None if axis < 0 else axis


def groups() -> dict:
    group_getters = {name: getattr(parallel_state, f"get_{long}_group") for name, long in GROUPS.items()}
    return {name: dist.get_process_group_ranks(group()) for name, group in group_getters.items()}


def run_case(config: dict, layout: ParallelLayout, ranks: list[int], overrides: dict) -> list[dict]:
    rows, folder = [], Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        start_parallel(layout)
        chunks = unwrap_model(build_model(folder, torch.bfloat16, overrides, load=False)[0])
        rows.append({"rank": rank, "groups": groups(), "chunks": [chunk_facts(chunk) for chunk in chunks]})
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return rows


def tensors_by_case(cases: dict[str, tuple]) -> dict[str, list[dict]]:
    """Return {name: rows} of cases; a case is HF config, layout, ranks, overrides of Megatron's configuration.

    A row is a rank's: {rank, groups: {name: ranks}, chunks: [{tensors: {name: [shape, dtype, cut axis]}, layers,
    experts, first_word}]}.
    """
    dist.new_group, gpt_layer_specs.DotProductAttention = fake_group, NoCore
    return {name: run_case(*case) for name, case in cases.items()}
