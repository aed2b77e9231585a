"""Every row of MEGATRON does its work, and the same code fails without it; one process tries them all."""

import json

import pytest

from verl_patches.platform.cpu import rows as cpu_rows

# row id -> code that is fine with the row and fails (raises, or asserts) without it
CHECKS = {
    "local_spec": "\nfrom verl.models.mcore.model_initializer import get_gpt_decoder_block_spec as spec\n"
    "layer = spec(config, use_transformer_engine=True).layer_specs[0]\n"
    "assert layer.submodules.self_attention.submodules.linear_proj.__name__ == 'RowParallelLinear'",
    "config": "\nfrom verl.models.mcore import hf_to_mcore_config\n"
    "made = hf_to_mcore_config(hf_config, torch.float32)\n"
    "assert not (made.moe_grouped_gemm or made.moe_shared_expert_overlap or made.persist_layer_norm)",
    "norm": "\nfrom megatron.core.models.gpt.gpt_layer_specs import LNImpl\n"
    "norm = LNImpl(config=config, hidden_size=8, eps=1e-6)\nassert norm.weight.sequence_parallel\n"
    "norm.weight.data.uniform_(); x = torch.randn(3, 8, dtype=torch.bfloat16)\n"
    "exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()\n"
    "assert torch.equal(norm(x), exact.bfloat16())",
    "attention_init": "\nfrom megatron.core.models.gpt.gpt_layer_specs import DotProductAttention\n"
    "DotProductAttention(config, 1, causal, 'self', k_channels=6, v_channels=4)",
    "attention": """
from types import SimpleNamespace
from megatron.core.models.gpt.gpt_layer_specs import DotProductAttention
core = DotProductAttention(config, 1, causal, 'self', softmax_scale=0.3)
q, k, v = (torch.randn(7, 2, d, dtype=torch.float64) for d in (6, 6, 4))
def plain(q, k, v):
    weights = torch.einsum('snd,tnd->nst', q, k) * 0.3
    weights = weights.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum('nst,tnd->snd', weights, v)
packed = core(q, k, v, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 7])))
assert torch.allclose(packed, torch.cat([plain(q[:5], k[:5], v[:5]), plain(q[5:], k[5:], v[5:])]))
padded = core(*(x[:, None].expand(-1, 2, -1, -1) for x in (q, k, v)), None)
assert torch.allclose(padded[:, 1], plain(q, k, v).flatten(1))""",
    "splits_to_cpu": "\nfrom megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu as move\n"
    "assert type(move(torch.tensor([1, 2]), as_numpy=True)).__name__ == 'ndarray'\nassert move(None, as_numpy=True) "
    "is None",
    "set_rng_state": "\nfrom megatron.core import tensor_parallel\n"
    "tracker = tensor_parallel.random.CudaRNGStatesTracker()\n"
    "tracker.add('a', 1); before = torch.get_rng_state()\n"
    "with tracker.fork('a'): first = torch.rand(1)\n"
    "assert torch.equal(torch.get_rng_state(), before) and first == torch.rand(1, "
    "generator=torch.Generator().manual_seed(1))",
    "quantize": "\nfrom megatron.core.optimizer.distrib_optimizer import quantize_param_shard as quantize\n"
    "quantize([], [], [], None)\n"
    "try: quantize([1], [1], [0], None)\nexcept RuntimeError: pass\nelse: raise AssertionError('fp8 is not refused')",
}
CODE = """
import json, sys, torch, traceback
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import parse
from verl_patches.platform.cpu import rows as cpu_rows

Engine(cpu_rows.TORCH, parse("line=pypi,platform=cpu")).apply()
import verl.models.mcore.model_initializer, megatron.core.optimizer.distrib_optimizer
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from transformers import AutoConfig
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
hf_config = AutoConfig.from_pretrained(sys.argv[2])
engine = Engine(cpu_rows.MEGATRON, parse("line=pypi,platform=cpu"))
engine.apply()
from verl.models.mcore import hf_to_mcore_config
config = hf_to_mcore_config(hf_config, torch.float32)
config.sequence_parallel = True
engine.revert()

def attempt(code, switches):
    engine = Engine(cpu_rows.MEGATRON, parse("line=pypi,platform=cpu" + switches))
    engine.apply()
    states = {row["id"]: row["state"] for row in engine.status()}
    try:
        exec(code, globals() | {"causal": AttnMaskType.causal})
        return "", states
    except Exception:
        return traceback.format_exc(), states
    finally:
        engine.revert()

found = {}
for name, code in json.loads(sys.argv[1]).items():
    with_row, states = attempt(code, "")
    without, _ = attempt(code, ",-platform.megatron_" + name)
    found[name] = [with_row, without, states["platform.megatron_" + name]]
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(run_warm, tiny_model):
    """Row -> [error with it, error without it, its state]."""
    said = run_warm(CODE, json.dumps(CHECKS), str(tiny_model), env={"TORCHDYNAMO_DISABLE": "1"}).check().out
    return json.loads(said.rpartition("FOUND")[2])


def test_every_row_has_a_check_and_is_for_workers_on_cpu():
    assert {row.id for row in cpu_rows.MEGATRON} == {f"platform.megatron_{name}" for name in CHECKS}
    assert {row.platforms for row in cpu_rows.MEGATRON} == {frozenset({"cpu"})}
    assert {row.processes for row in cpu_rows.MEGATRON} == {frozenset({"worker"})}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_row_works_and_is_needed(found, name):
    with_row, without, state = found[name]
    assert state == "active"
    assert not with_row, with_row
    assert without, "the code runs without the row: the row is not needed"
