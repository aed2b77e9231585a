"""Every row of TORCH does its work, and the same code fails without it; one process tries them all."""

import json

import pytest

from verl_patches.platform.cpu import rows as cpu_rows
from verl_patches.platform.cpu.torch_on_cpu import to_on_cpu

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks

# row id -> code that is fine with the row and fails (raises, or asserts) without it
CHECKS = {
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
    "pin_memory": "\nx = torch.ones(3)\nkept = x.pin_memory()\n"
    "x.untyped_storage().resize_(0)\nassert kept.tolist() == [1, 1, 1]",
    "init_process_group": "\nstore = torch.distributed.HashStore()\n"
    "torch.distributed.init_process_group('nccl', store=store, rank=0, world_size=1)\n"
    "try: assert torch.distributed.get_backend() == 'gloo'\nfinally: torch.distributed.destroy_process_group()",
    "init_device_mesh": "\nfrom torch.distributed.device_mesh import init_device_mesh\n"
    "store = torch.distributed.HashStore()\n"
    "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
    "try: assert init_device_mesh('cuda', (1,)).device_type == 'cpu'\nfinally: "
    "torch.distributed.destroy_process_group()",
}
# only a CUDA build of torch needs it: that it is in place is all that can be seen here
UNSEEN = {"optimizer_health"}
CODE = """
import json, sys, torch, traceback
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import parse
from verl_patches.platform.cpu.rows import TORCH as ROWS

def attempt(code, switches):
    engine = Engine(ROWS, parse("line=pypi,platform=cpu" + switches))
    engine.apply()
    states = {row["id"]: row["state"] for row in engine.status()}
    try:
        exec(code, {"torch": torch})
        return "", states
    except Exception:
        return traceback.format_exc(), states
    finally:
        engine.revert()

def snapshot():
    return dict(vars(torch.cuda)), dict(vars(torch.Tensor)), dict(vars(torch.distributed)), torch.zeros, torch.tensor

before, changing = snapshot(), []
for platform in ("npu", "cuda", "cpu"):
    engine = Engine(ROWS, parse("line=pypi,platform=" + platform))
    engine.apply()
    if snapshot() != before:
        changing.append(platform)
    engine.revert()
found = {"platforms that change torch": changing}
for name, code in json.loads(sys.argv[1]).items():
    with_row, states = attempt(code, "")
    without, _ = attempt(code, ",-platform.torch_" + name)
    found[name] = [with_row, without, states["platform.torch_" + name]]
found["left after revert"] = snapshot() != before
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(run_warm):
    """Row -> [error with it, error without it, its state]."""
    said = run_warm(CODE, json.dumps({**CHECKS, **dict.fromkeys(UNSEEN, "pass")})).check().out
    return json.loads(said.rpartition("FOUND")[2])


def test_every_row_has_a_check():
    assert {row.id for row in cpu_rows.TORCH} == {f"platform.torch_{name}" for name in {*CHECKS, *UNSEEN}}


def test_rows_are_for_the_cpu_platform_only():
    assert {row.platforms for row in cpu_rows.TORCH} == {frozenset({"cpu"})}


@pytest.mark.parametrize("name", CHECKS)
def test_row_works_and_is_needed(found, name):
    with_row, without, state = found[name]
    assert state == "active"
    assert not with_row, with_row
    assert without, "the code runs without the row: the row is not needed"


@pytest.mark.parametrize("name", sorted(UNSEEN))
def test_row_is_in_place(found, name):
    assert found[name][2] == "active"


@pytest.mark.parametrize(("asked", "given"), [("cuda", "cpu"), ("cuda:1", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_row_platform_data_to_cuda(asked, given):
    """Row platform.data_to_cuda: only cuda becomes the CPU."""
    assert to_on_cpu(lambda self, device: (self, device))("batch", asked) == ("batch", given)
    assert to_on_cpu(lambda self, device: (self, device))("batch", device=asked) == ("batch", given)


def test_nothing_stays_after_revert_or_on_other_platforms(found):
    assert found["platforms that change torch"] == ["cpu"]
    assert found["left after revert"] is False
