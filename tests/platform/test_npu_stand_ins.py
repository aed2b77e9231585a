"""Line a3 on platform cpu: what `import torch_npu` and its kin give, and that nothing of it is there elsewhere."""

import json

import pytest

from verl_patches.patching.switches import Switches
from verl_patches.platform.cpu import rows as cpu_rows
from verl_patches.platform.cpu.ascend import packages

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks

# package -> modules inside it that upstream imports
STUBS = {
    "torch_npu": ("torch_npu.npu", "torch_npu.contrib.transfer_to_npu", "torch_npu.utils.collect_env",
                  "torch_npu.profiler.profiler"),
    "apex": ("apex.optimizers", "apex.multi_tensor_apply", "apex.normalization.fused_layer_norm"),
    "acl": (),
    "torchair": ("torchair.ge",),
}  # fmt: skip
START = """
import dataclasses
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches
from verl_patches.platform.cpu import rows as cpu_rows
rows = [dataclasses.replace(row, lines=frozenset({"a3", "pypi"})) for row in cpu_rows.TORCH] + list(cpu_rows.NPU)
engine = Engine(rows, Switches(LINE, "cpu"))
engine.apply()
import torch
"""


STUB = """
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
# row id -> code that is fine with the row and fails (raises, or asserts) without it
CHECKS = {
    **{f"module_{name}": STUB.format([name, *inner]) for name, inner in STUBS.items()},
    "device": "assert torch.npu.current_device() == torch.device('cpu')",
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
FAKE_MINDSPEED = {  # the real builders are loaded in test_npu_upstream
    "__init__.py": "", "op_builder/__init__.py": "", "megatron_adaptor.py": "def type_wrapper(fn): return fn",
    "op_builder/builder.py": "class MindSpeedOpBuilder:\n    def __init__(self, name): self.name = name\n"
    "    def load(self, verbose=True): raise RuntimeError('no compiler')\n",
    "op_builder/atb_builder.py": "from mindspeed.op_builder.builder import MindSpeedOpBuilder\n"
    "class AtbOpBuilder(MindSpeedOpBuilder):\n    def load(self, verbose=True): raise RuntimeError('no ATB')\n",
}  # fmt: skip
ATTEMPTS = """
import dataclasses, json, pathlib, sys, traceback
from verl_patches.patching import fingerprint
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches
from verl_patches.platform.cpu import rows as cpu_rows
rows = [dataclasses.replace(row, lines=frozenset({"a3"})) for row in cpu_rows.TORCH] + list(cpu_rows.NPU)
fingerprint.REVIEWED = pathlib.Path("no-reviews")  # the fake mindspeed has bodies of its own
import torch

def attempt(code, name, patterns):
    engine = Engine(rows, Switches("a3", "cpu", patterns))
    engine.apply()
    try:
        exec(code, {"torch": torch})
        failure = ""
    except Exception:
        failure = traceback.format_exc()
    state = next(row["state"] for row in engine.status() if row["id"] == name)
    engine.revert()
    for module in [m for m in sys.modules if m.split(".")[0] in ("torch_npu", "apex", "acl", "torchair", "mindspeed")]:
        del sys.modules[module]
    return failure, state

found = {}
for name, code in json.loads(sys.argv[1]).items():
    name = "platform.npu_" + name
    needed_by = tuple(f"-{row.id}" for row in rows if name in row.needs)
    found[name] = [*attempt(code, name, ()), *attempt(code, name, (f"-{name}", *needed_by))]
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def attempts(run_python, tmp_path_factory):
    """Row id -> [failure with it, its state then, failure without it, its state then]."""
    folder = tmp_path_factory.mktemp("fake")
    for name, text in FAKE_MINDSPEED.items():
        (folder / "mindspeed" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mindspeed" / name).write_text(text)
    out = run_python(ATTEMPTS, json.dumps(CHECKS), env={"PYTHONPATH": str(folder)}).check().out
    return json.loads(out.rpartition("FOUND")[2])


def test_every_row_has_a_check():
    assert {row.id for row in cpu_rows.NPU} == {f"platform.npu_{name}" for name in CHECKS}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_row_works_and_is_needed(attempts, name):
    with_row, state, without, off = attempts[f"platform.npu_{name}"]
    assert not with_row, with_row
    assert (state, off) == ("active", "off")
    assert without, "the code runs without the row: the row is not needed"


@pytest.fixture
def on_a3(run_python):
    """Run code in a fresh process in which the rows of line a3 on cpu stand."""
    return lambda code: run_python("LINE = 'a3'" + START + code).check()


@pytest.mark.parametrize(("line", "platform"), [("a3", "npu"), ("a3", "cuda"), ("pypi", "cpu"), ("pypi", "npu")])
def test_nothing_is_wanted_elsewhere(line, platform):
    assert not [row.id for row in cpu_rows.NPU if Switches(line, platform).decide(row)[0]]


def test_torch_npu_calls_itself_what_it_stands_for(on_a3):
    on_a3("import torch_npu, apex; assert (torch_npu.__version__, apex.__version__) == ('2.5.1.post1', '0')")


def test_all_is_wanted_on_a3_cpu():
    assert all(Switches("a3", "cpu").decide(row)[0] for row in cpu_rows.NPU)


def test_on_another_line_torch_npu_stays_missing(run_python):
    run_python(
        "LINE = 'pypi'"
        + START
        + """
for name in ("torch_npu", "acl", "apex", "torchair"):
    try: __import__(name)
    except ModuleNotFoundError: pass
    else: raise SystemExit(name + " can be imported")
assert not hasattr(torch, "npu") and not hasattr(torch.Tensor, "npu")
"""
    ).check()


def test_every_module_imports_and_every_row_is_active(on_a3):
    on_a3(f"""
import importlib
for name in {[*STUBS, *(name for inner in STUBS.values() for name in inner)]!r}: importlib.import_module(name)
upstream = ("mindspeed.",)
states = {{r["id"]: r["state"] for r in engine.status() if not r["target"].startswith(upstream)}}
assert set(states.values()) == {{"active"}}, states
import torch_npu
from torch_npu.contrib import transfer_to_npu
from torch_npu.npu import _lazy_call, device
assert not hasattr(torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options, "hccl_config")
engine.revert()
assert not hasattr(torch, "npu")
""")


def test_unknown_names_say_where_to_add_them_or_why_not(on_a3):
    on_a3("""
import torch_npu
for place, name, words in (
    (torch_npu, "npu_magic", "add it to verl_patches.platform.cpu.ascend.packages"),
    (torch_npu, "npu_mm_reduce_scatter_base", "use_ascend_mc2"),
    (torch.npu, "magic", "add it to verl_patches.platform.cpu.ascend.packages"),
    (torch.npu, "memory_stats", "adaptive recompute"),
):
    assert not hasattr(place, name)
    try: getattr(place, name)
    except AttributeError as error: assert name in str(error) and words in str(error), error
    else: raise SystemExit("there is " + name)
try: from torch_npu import npu_magic
except ImportError: pass
else: raise SystemExit("imported")
""")


def test_the_device_is_the_cpu(on_a3):
    on_a3("""
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
with npu.device(0): pass
""")


def test_what_has_no_reference_refuses_by_name(on_a3):
    on_a3("""
from apex.optimizers import FusedAdam
from apex.normalization.fused_layer_norm import fused_rms_norm_affine
from torch_npu.profiler.profiler import analyse
for call, words in ((lambda: FusedAdam([]), "FusedAdam"), (fused_rms_norm_affine, "fused_rms_norm_affine"),
                    (analyse, "analyse")):
    try: call()
    except RuntimeError as error: assert words in str(error)
    else: raise SystemExit(words + " was accepted")
import acl
assert "910B" not in acl.get_soc_name() and not hasattr(acl, "rt")
""")


def test_builders_load_the_references_and_refuse_the_rest():
    from types import SimpleNamespace

    from verl_patches.platform.cpu.ascend import mindspeed_ops

    assert mindspeed_ops.load(SimpleNamespace(name="grouped_matmul")).npu_gmm is mindspeed_ops.npu_gmm
    lcal = type("LcalOpBuilder", (), {"name": "lcal"})()
    with pytest.raises(RuntimeError, match=r"LcalOpBuilder has no reference for CPU: --use-ascend-coc"):
        mindspeed_ops.load(lcal)
    with pytest.raises(RuntimeError, match="add 'new'"):
        mindspeed_ops.load(SimpleNamespace(name="new"))


def test_reasons_cover_what_lies_below_a_name():
    assert "profiling" in packages.reason("torch_npu.profiler.ProfilerLevel.Level1")
    assert packages.reason("torch_npu.npu_rms_norm") is None
    assert packages.reason("torch_npu.npu.memory_statistics") is None
