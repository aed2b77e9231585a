"""Every row of TORCH, MEGATRON and NPU does its work, and the same code fails without it; a process for each table."""

import functools
import json

import pytest

from verl_patches.emulation import rows as cpu_rows
from verl_patches.emulation.cpu.torch_on_cpu import to_on_cpu

# row id -> code that is fine with the row and fails (raises, or asserts) without it
TORCH = {
    "is_available": "assert torch.cuda.is_available()",
    "device_count": "assert torch.cuda.device_count() == 1",
    "current_device": "assert torch.zeros(1, device=torch.cuda.current_device()).device.type == 'cpu'",
    "set_device": "torch.cuda.set_device(0)",
    "synchronize": "torch.cuda.synchronize()",
    "device_properties": "assert torch.cuda.get_device_name() == 'cpu'; "
    "torch.cuda.get_device_properties(0).gcnArchName",
    "mem_get_info": "free, total = torch.cuda.mem_get_info(); assert 0 < free < total",
    "stream_class": "\nside = torch.cuda.Stream(device=0)\nside.synchronize()\nwith torch.cuda.stream(side):\n"
    "    assert torch.cuda.current_stream() is side and side.record_event().query()",
    "current_stream": "torch.cuda.current_stream()",
    "stream": "\nside = torch.cpu.Stream()\nwith torch.cuda.stream(side): assert torch.cpu.current_stream() is side",
    "get_rng_state": "torch.manual_seed(3); assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())",
    "set_rng_state": "\nstate = torch.get_rng_state()\nfirst = torch.rand(1)\n"
    "torch.cuda.set_rng_state(state)\nassert torch.rand(1) == first",
    "manual_seed": "\ntorch.cuda.manual_seed(7)\nfirst = torch.rand(1)\n"
    "torch.cuda.manual_seed(7)\nassert torch.rand(1) == first",
    "zeros": "assert torch.zeros(2, device='cuda').device.type == 'cpu'",
    "tensor": "assert torch.tensor([1], device=torch.device('cuda', 0)).device.type == 'cpu'\n"
    "assert torch.tensor([3], device='npu', pin_memory=True).tolist() == [3]",
    "tensor_cuda": "x = torch.ones(1); assert x.cuda() is x; torch.nn.Linear(1, 1).cuda()",
    "tensor_type": "\nx = torch.ones(1)\nassert x.type() == 'torch.cuda.FloatTensor'\n"
    "assert x.type(torch.float64).dtype == torch.float64",
    "pin_memory": "\nx = torch.ones(3)\ncopy = x.pin_memory()\n"
    "x.untyped_storage().resize_(0)\nassert copy.tolist() == [1, 1, 1]",
    "init_process_group": "\nstore = torch.distributed.HashStore()\n"
    "torch.distributed.init_process_group('nccl', store=store, rank=0, world_size=1)\n"
    "try: assert torch.distributed.get_backend() == 'gloo'\nfinally: torch.distributed.destroy_process_group()",
    "init_device_mesh": "\nfrom torch.distributed.device_mesh import init_device_mesh\n"
    "store = torch.distributed.HashStore()\n"
    "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
    "try: assert init_device_mesh('cuda', (1,)).device_type == 'cpu'\nfinally: "
    "torch.distributed.destroy_process_group()",
    "optimizer_health": "pass",  # only a CUDA build of torch needs it: that it is active is all that can be seen here
}  # fmt: skip
NOT_NEEDED_HERE = {"optimizer_health"}
MEGATRON = {
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
    "assert type(move(torch.tensor([1, 2]), as_numpy=True)).__name__ == 'ndarray'\n"
    "assert move(None, as_numpy=True) is None",
    "set_rng_state": "\nfrom megatron.core import tensor_parallel\n"
    "tracker = tensor_parallel.random.CudaRNGStatesTracker()\n"
    "tracker.add('a', 1); before = torch.get_rng_state()\n"
    "with tracker.fork('a'): first = torch.rand(1)\n"
    "assert torch.equal(torch.get_rng_state(), before)\n"
    "assert first == torch.rand(1, generator=torch.Generator().manual_seed(1))",
    "quantize": "\nfrom megatron.core.optimizer.distrib_optimizer import quantize_param_shard as quantize\n"
    "quantize([], [], [], None)\n"
    "try: quantize([1], [1], [0], None)\nexcept RuntimeError: pass\nelse: raise AssertionError('fp8 is not refused')",
}  # fmt: skip
# package -> modules inside it that upstream imports
PACKAGES = {
    "torch_npu": "npu contrib.transfer_to_npu utils.collect_env profiler.profiler",
    "apex": "optimizers multi_tensor_apply normalization.fused_layer_norm",
    "acl": "",
    "torchair": "ge",
}
IMPORTED = """
import importlib
for name in {!r}:
    m = importlib.import_module(name)
    assert m.__doc__ and m.__name__ == name
    try: m.npu_magic
    except AttributeError as e: assert str(e).startswith('the stand-in for ' + name + ' has no'), e
    else: raise AssertionError('npu_magic')
    try: importlib.import_module(name + '.magic')
    except ModuleNotFoundError: pass
    else: raise AssertionError(name + '.magic')
"""
NPU = {
    **{f"module_{name}": IMPORTED.format([name, *(f"{name}.{part}" for part in inner.split())])
       for name, inner in PACKAGES.items()},
    "device": """
npu = torch.npu
assert npu.is_available() and npu.device_count() == 1 and npu.current_device() == torch.device("cpu")
side = npu.Stream()
with npu.stream(side):
    assert npu.current_stream() is side
    event = npu.current_stream().record_event()
assert npu.current_stream() is npu.default_stream()
npu.default_stream().wait_event(event); event.wait(); npu.synchronize()
first, last = npu.Event(enable_timing=True), npu.Event()
first.record(); last.record()
assert first.elapsed_time(last) >= 0
npu.manual_seed_all(7); before = torch.rand(1)
state = npu.default_generators[npu.current_device()].get_state()
npu.manual_seed(7); assert torch.equal(torch.rand(1), before)
with npu.device(0): pass""",
    "tensor_npu": "x = torch.ones(2); assert x.npu() is x and x.npu(non_blocking=True) is x",
    "tensor_to": "\nx = torch.ones(2)\nfor y in (x.to('npu'), x.to('npu:0'), x.to(device='npu'), x.to(torch.int64)):\n"
    "    assert y.device.type == 'cpu' and y.tolist() == [1, 1]",
    "empty": "assert torch.empty(2, pin_memory=True, device='cpu').shape == (2,)",
    "empty_like": "assert torch.empty_like(torch.ones(2), pin_memory=True, device='cpu').shape == (2,)",
    "histc": "counts = torch.histc(torch.tensor([0, 3, 3, 1]), bins=4, min=0, max=4)\n"
    "assert counts.tolist() == [1, 1, 0, 2] and counts.dtype == torch.int64\n"
    "assert torch.histc(torch.tensor([0.5, 2.5]), bins=4, min=0, max=4).tolist() == [1, 0, 1, 0]",
    "jit_script": "\ndef f(x): return x\nassert torch.jit.script(f) is f",
    "library": "\nlib = torch.library.Library('mindspeed', 'DEF')\ntry:\n    lib.define('twice(Tensor x) -> Tensor')\n"
    "    torch.library.impl(lib, 'twice', 'PrivateUse1')(lambda x: 2 * x)\n"
    "    assert torch.ops.mindspeed.twice(torch.ones(1)) == 2\nfinally: lib._destroy()",
    "tensor_type": "from mindspeed.megatron_adaptor import type_wrapper\n"
    "asked = type_wrapper(lambda x, dtype=None: x.to(dtype) if dtype else 'torch.FloatTensor')\n"
    "assert asked(torch.ones(1)) == 'torch.cuda.FloatTensor' and asked(torch.ones(1), torch.int8).dtype == torch.int8",
    "builder": "from mindspeed.op_builder.builder import MindSpeedOpBuilder as B\n"
    "assert B('grouped_matmul').load().npu_gmm",
    "atb_builder": "from mindspeed.op_builder.atb_builder import AtbOpBuilder as B\n"
    "assert B('npu_matmul_add_fp32').load().npu_matmul_add_fp32",
}  # fmt: skip
FAKE_MINDSPEED = {  # the real builders are loaded in tests/model
    "__init__.py": "", "op_builder/__init__.py": "", "megatron_adaptor.py": "def type_wrapper(fn): return fn",
    "op_builder/builder.py": "class MindSpeedOpBuilder:\n    def __init__(self, name): self.name = name\n"
    "    def load(self, verbose=True): raise RuntimeError('no compiler')\n",
    "op_builder/atb_builder.py": "from mindspeed.op_builder.builder import MindSpeedOpBuilder\n"
    "class AtbOpBuilder(MindSpeedOpBuilder):\n    def load(self, verbose=True): raise RuntimeError('no ATB')\n",
}  # fmt: skip

# what comes before the attempts of each table: `rows`, `line` and names that the code uses
BEFORE = {
    "torch": "rows, line = cpu_rows.TORCH, 'pypi'",
    "npu": """
rows, line = [dataclasses.replace(row, lines=frozenset({"a3"})) for row in cpu_rows.TORCH] + list(cpu_rows.NPU), "a3"
fingerprint.REVIEWED = pathlib.Path("no-reviews")  # the fake mindspeed has bodies of its own
""",
    "megatron": """
Engine(cpu_rows.TORCH, Switches("pypi", "cpu")).apply()
import verl.models.mcore.model_initializer, megatron.core.optimizer.distrib_optimizer
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from transformers import AutoConfig
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
hf_config, causal = AutoConfig.from_pretrained(sys.argv[2]), AttnMaskType.causal
rows, line = cpu_rows.MEGATRON, "pypi"
engine = Engine(rows, Switches(line, "cpu"))
engine.apply()
from verl.models.mcore import hf_to_mcore_config
config = hf_to_mcore_config(hf_config, torch.float32)
config.sequence_parallel = True
engine.revert()
""",
}
CODE = """
import dataclasses, json, pathlib, sys, torch, traceback
from verl_patches.patching import fingerprint
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches
from verl_patches.emulation import rows as cpu_rows
{before}

def attempt(code, name, *patterns):
    engine = Engine(rows, Switches(line, "cpu", patterns))
    engine.apply()
    try:
        exec(code, dict(globals()))
        failure = ""
    except Exception:
        failure = traceback.format_exc()
    states = {{row["id"]: row["state"] for row in engine.status()}}
    engine.revert()
    for module in [m for m in sys.modules if m.split(".")[0] in ("torch_npu", "apex", "acl", "torchair", "mindspeed")]:
        if line == "a3": del sys.modules[module]
    return failure, states[name]

found = {{}}
for name, code in json.loads(sys.argv[1]).items():
    needed_by = [f"-{{row.id}}" for row in rows if name in row.needs]
    found[name] = *attempt(code, name), *attempt(code, name, f"-{{name}}", *needed_by)
print("FOUND" + json.dumps(found))
"""
TABLES = {"torch": TORCH, "npu": NPU, "megatron": MEGATRON}
CASES = [pytest.param(table, name, id=f"{table}_{name}") for table, checks in TABLES.items() for name in checks]


@pytest.fixture(scope="module")
def found(run_warm, tiny_model, tmp_path_factory):
    """found(table): {row id: [failure with the row, state, failure without it, state]}."""
    folder = tmp_path_factory.mktemp("fake")
    for name, text in FAKE_MINDSPEED.items():
        (folder / "mindspeed" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mindspeed" / name).write_text(text)

    @functools.cache
    def run(table):
        checks = {f"platform.{table}_{name}": code for name, code in TABLES[table].items()}
        env = {"TORCHDYNAMO_DISABLE": "1", **({"PYTHONPATH": str(folder)} if table == "npu" else {})}
        code = CODE.format(before=BEFORE[table])
        out = run_warm(code, json.dumps(checks), str(tiny_model), env=env).check().out
        return json.loads(out.rpartition("FOUND")[2])

    return run


def test_every_row_has_a_check_and_is_for_no_device():
    rows = (*cpu_rows.TORCH, *cpu_rows.NPU, *cpu_rows.MEGATRON)
    assert {row.id for row in rows} == {f"platform.{table}_{name}" for table in TABLES for name in TABLES[table]}
    assert {row.platforms for row in rows} == {frozenset({"cpu"}), frozenset({"cpu", "npu_emulated"})}
    assert {row.processes for row in cpu_rows.MEGATRON} == {frozenset({"worker"})}
    assert {row.lines for row in cpu_rows.NPU} == {frozenset({"a3"})}


@pytest.mark.slow
@pytest.mark.parametrize(("table", "name"), CASES)
def test_row_works_and_is_needed(found, table, name):
    """With the row first: the code fails without it only if nothing stays after revert."""
    with_row, state, without, off = found(table)[f"platform.{table}_{name}"]
    assert not with_row, with_row
    assert (state, off) == ("active", "off")
    assert without or name in NOT_NEEDED_HERE, "the code runs without the row: the row is not needed"


@pytest.mark.parametrize(("requested", "used"), [("cuda", "cpu"), ("cuda:1", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_row_platform_data_to_cuda(requested, used):
    """Row platform.data_to_cuda: only cuda becomes the CPU."""
    assert to_on_cpu(lambda self, device: (self, device))("batch", requested) == ("batch", used)
    assert to_on_cpu(lambda self, device: (self, device))("batch", device=requested) == ("batch", used)
