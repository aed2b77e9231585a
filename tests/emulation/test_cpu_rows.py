"""Every row of TORCH does its work, and the same code fails without it; other tables: tests/model, tests/loop."""

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
CODE = """
import json, sys, torch, traceback
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches
from verl_patches.emulation import rows as cpu_rows

def attempt(code, name, *patterns):
    engine = Engine(cpu_rows.TORCH, Switches("pypi", "cpu", patterns))
    engine.apply()
    try:
        exec(code, dict(globals()))
        failure = ""
    except Exception:
        failure = traceback.format_exc()
    states = {row["id"]: row["state"] for row in engine.status()}
    engine.revert()
    return failure, states[name]

found = {}
for name, code in json.loads(sys.argv[1]).items():
    needed_by = [f"-{row.id}" for row in cpu_rows.TORCH if name in row.needs]
    found[name] = *attempt(code, name), *attempt(code, name, f"-{name}", *needed_by)
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(run_warm):
    """{row id: [failure with the row, state, failure without it, state]}."""
    checks = {f"platform.torch_{name}": code for name, code in TORCH.items()}
    out = run_warm(CODE, json.dumps(checks), env={"TORCHDYNAMO_DISABLE": "1"}).check().out
    return json.loads(out.rpartition("FOUND")[2])


def test_every_row_has_a_check():
    assert {row.id for row in cpu_rows.TORCH} == {f"platform.torch_{name}" for name in TORCH}


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH)
def test_row_works_and_is_needed(found, name):
    """With the row first: the code fails without it only if nothing stays after revert."""
    with_row, state, without, off = found[f"platform.torch_{name}"]
    assert not with_row, with_row
    assert (state, off) == ("active", "off")
    assert without or name in NOT_NEEDED_HERE, "the code runs without the row: the row is not needed"


@pytest.mark.parametrize(("requested", "used"), [("cuda", "cpu"), ("cuda:1", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_row_platform_data_to_cuda(requested, used):
    """Row platform.data_to_cuda: only cuda becomes the CPU."""
    assert to_on_cpu(lambda self, device: (self, device))("batch", requested) == ("batch", used)
    assert to_on_cpu(lambda self, device: (self, device))("batch", device=requested) == ("batch", used)
