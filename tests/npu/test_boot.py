"""Test imports: each kind of process of line a3 on platform npu starts as in production, without a device.

boot_job.py runs the start itself; the data below list what may wait and what cannot be imported here. torch_npu is the
real one over stand-ins for CANN (scripts/npu_venv.sh); acl, apex and numba are from image/, which holds the names that
the image's packages have. Nothing here shows that HCCL, kernels or memory work.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.npu.conftest import HERE, ROOT, run_program
from verl_patches.catalog import ROWS
from verl_patches.patching.switches import Switches
from verl_patches.platform.npu import INTERFACE_VARIABLES

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
TREES = ("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM", "vllm-ascend")
KINDS = ("driver", "controller", "worker")
WANTED = {row.id: row for row in ROWS if Switches("a3", "npu").decide(row)[0]}

# kind -> modules (or whole packages) that this kind never imports while it starts: their rows may wait there
NEVER_IMPORTED = {
    "driver": ("megatron", "mindspeed_llm", "transformers", "verl", "vllm", "vllm_ascend"),
    "controller": (
        "megatron.core.models", "megatron.core.packed_seq_params", "mindspeed_llm",  # no model is built
        "verl.models.mcore.registry", "verl.models.mcore.util", "verl.utils.megatron.optimizer",
        "verl.workers.rollout", "verl.workers.sharding_manager", "vllm", "vllm_ascend",  # no engine either
    ),
    "worker": ("verl.trainer.ppo.metric_utils", "verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.reward",
               "verl.utils.dataset.rl_dataset", "verl.utils.tracking"),
}  # fmt: skip
STEPS = {
    "driver": ["verl_patches.main"],
    "controller": ["set-up hook", "verl.trainer.main_ppo", "TaskRunner.run"],
    "worker": ["set-up hook", "verl", "verl.workers.megatron_workers", "ActorRolloutRefWorker.__init__",
               "imports of ActorRolloutRefWorker's methods", "vLLM's platform and plugins", "modules of vllm_ascend"],
}  # fmt: skip
REACHED = {"driver": "ray.init", "controller": "RayPPOTrainer.init_workers", "worker": "start._start_distributed"}

# Modules of vllm-ascend that cannot be imported here -> (what the error says, why it is not on our path)
_NO_DATADIST = ("No module named 'llm_datadist'", "CANN's package for prefill and decode in different engines")
NOT_IMPORTED = {
    "vllm_ascend.compilation.piecewise_backend":
        ("has no attribute 'rms_norm'", "graphs of ACL, piece by piece; vLLM's compiled ops are not in the image"),
    **{f"vllm_ascend.distributed.{name}": _NO_DATADIST for name in (
        "kv_transfer.simple_buffer", "kv_transfer.simple_connector", "kv_transfer.simple_pipe", "kv_transfer.utils",
        "llmdatadist_c_mgr_connector", "llmdatadist_connector")},
}  # fmt: skip


def faults(kind: str, found: dict) -> list[str]:
    """Return the faults in the start of a process, in words; empty if it is proven."""
    wrong = [f"the start failed at {found['failed']}"] if "failed" in found else []
    for name, row in WANTED.items():
        state, reason = found["rows"].get(name, ("off", "unknown there"))
        if state == "waiting" and _never(kind, row.target_module):
            continue
        if state != "active":
            wrong.append(f"row {name} at {row.target} is {state} ({reason})")
    modules = [row.target_module for row in WANTED.values()]
    imported = [module for module in found["targets"] if _never(kind, module)]
    stale = [name for name in NEVER_IMPORTED[kind] if not any(_in(module, name) for module in modules)]
    wrong += [f"{kind} imports {module}, which NEVER_IMPORTED lists" for module in imported]
    return wrong + [f"no row waits for {name}, which NEVER_IMPORTED lists" for name in stale]


def _never(kind: str, module: str) -> bool:
    return any(_in(module, listed) for listed in NEVER_IMPORTED[kind])


def _in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


class Starts:
    """Run boot_job.py, the driver first, as the others start from its files; `found`: {kind: its findings}."""

    def __init__(self, folder: Path, upstream: Path, python: str, settings: dict[str, str]):
        self.folder, self.python = folder, python
        path = [ROOT, *(upstream / tree for tree in TREES), HERE / "image", folder / "installed"]
        self.env = {name: value for name, value in os.environ.items() if name != "VERL_PATCHES"}
        self.env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "VERL_PATCHES": "line=a3,platform=npu", **settings}
        # as a node may; else Ray's head is asked, and there is none
        self.env |= dict.fromkeys(INTERFACE_VARIABLES, "eth0")
        _what_the_run_has(folder)
        _installed(folder / "installed", upstream / "vllm-ascend" / "setup.py")
        driver = self.start("driver")
        every_row = self.env["VERL_PATCHES"]  # the run's own names the rows that its features need
        self.env |= driver.get("env_vars", {}) | {"VERL_PATCHES": every_row}  # Ray ships these to every worker
        self.found = {"driver": driver, "controller": self.start("controller"), "worker": self.start("worker")}

    def start(self, kind: str, switches: str = "") -> dict:
        """Return the JSON of one start; `switches` are appended to VERL_PATCHES."""
        env = self.env | {"VERL_PATCHES": self.env["VERL_PATCHES"] + switches}
        done = run_program(self.python, "-W", "ignore", HERE / "boot_job.py", kind, self.folder, env=env)
        return json.loads((self.folder / f"{kind}.json").read_text()) | {"stderr": done.stderr[-6000:]}


def _what_the_run_has(folder: Path) -> None:
    """Write a model folder (configuration of the 671B model, a small tokenizer) and one batch of prompts."""
    import pandas

    from verl_patches.model import tiny

    tiny._make_tokenizer(tiny.tiny_config()).save_pretrained(folder / "model")
    shutil.copy(ROOT / "configs" / "model" / "deepseekv3_671b.json", folder / "model" / "config.json")
    row = {"prompt": [{"role": "user", "content": "1 + 1 = ?"}], "data_source": "learnable", "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}}
    pandas.DataFrame([row] * 512).to_parquet(folder / "data.parquet")


def _installed(folder: Path, setup: Path) -> None:
    """Write pip's metadata of vLLM and vllm-ascend: versions, and the entry points of vllm-ascend's setup.py."""
    keywords = [node for node in ast.walk(ast.parse(setup.read_text())) if isinstance(node, ast.keyword)]
    call = next(node for node in keywords if node.arg == "entry_points")
    points = "\n".join(f"[{group}]\n" + "\n".join(lines) for group, lines in ast.literal_eval(call.value).items())
    for name, more in (("vllm", ""), ("vllm_ascend", points)):
        info = folder / f"{name}-0.9.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.1\n")
        (info / "entry_points.txt").write_text(more)


@pytest.fixture(scope="module")
def upstream(pytestconfig) -> Path:
    folder = pytestconfig.getoption("--upstream")
    if not all((folder / tree).is_dir() for tree in TREES):
        pytest.skip(f"--upstream {folder} holds no checkouts of {', '.join(TREES)}: fetch_upstream.sh makes them")
    return folder.absolute()


@pytest.fixture(scope="module")
def starts(upstream, npu_python, tmp_path_factory) -> Starts:
    """Return the starts with the torch_npu that `import torch` loads by itself, as in the image."""
    python, settings = npu_python
    return Starts(tmp_path_factory.mktemp("boot"), upstream, python, settings | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})


@pytest.mark.parametrize("kind", KINDS)
def test_every_wanted_row_is_active_or_waits_for_what_is_never_imported(starts, kind):
    found = starts.found[kind]
    assert faults(kind, found) == [], found["stderr"]
    assert found["steps"] == STEPS[kind] and found["reached"] == REACHED[kind]
    assert any(found["rows"][name][0] == "active" for name in WANTED)
    assert kind != "driver" or {"torch", "torch_npu", "verl", "vllm", "megatron"}.isdisjoint(found["top level"])


def test_importing_verl_prepares_mindspeed_before_megatron(starts):
    found = starts.found["worker"]
    assert found["first of the engine after the hook"] is None  # torch_npu would come before Ray sets the visible die
    assert found["first of the engine after verl"] == "mindspeed_llm"
    assert "verl.workers.rollout.vllm_rollout" in found["lazy"]


def test_vllm_takes_vllm_ascends_classes(starts):
    found = starts.found["worker"]
    assert {name: found[name] for name in ("platform", "worker", "attention", "model")} == {
        "platform": "vllm_ascend.platform.NPUPlatform",
        "worker": "vllm_ascend.worker.worker_v1.NPUWorker",
        "attention": "vllm_ascend.attention.mla_v1.AscendMLABackend",
        "model": "vllm_ascend.models.deepseek_v2.CustomDeepseekV3ForCausalLM",
    }


def test_all_of_vllm_ascend_can_be_imported_but_what_is_listed(starts):
    """Refuse a listed module that can be imported, too; without vllm_ascend_C sleep mode is missing."""
    found = starts.found["worker"]["not imported"]
    assert found.keys() == NOT_IMPORTED.keys()
    assert {name: why for name, why in found.items() if NOT_IMPORTED[name][0] not in why} == {}
    assert starts.found["worker"]["sleep mode"] is False  # vllm_ascend.device_allocator.camem.camem_available


# row that is switched off -> (step that fails, part of its error)
CONTROLS = {
    "platform.flash_attn*": ("verl.workers.megatron_workers", "No module named 'flash_attn.bert_padding'"),
    "model.mla_config_name": ("imports of ActorRolloutRefWorker's methods", "import name 'MLATransformerConfig'"),
    "update.engine_start": ("ActorRolloutRefWorker.__init__", "asked for by megatron_workers.__init__"),
}


@pytest.mark.parametrize("row", CONTROLS)
def test_the_proof_fails_without_a_row_and_names_it(starts, row):
    step, error = CONTROLS[row]
    found = faults("worker", starts.start("worker", f",-{row}"))
    assert found[0].startswith(f"the start failed at {step}: ") and error in found[0]
    named = [fault for fault in found if fault.startswith(f"row {row.rstrip('*')}")]
    assert named and all(f"is off (switched off by -{row})" in fault for fault in named)


def test_a_row_that_waits_though_its_module_is_there_is_a_fault(starts):
    """Change the findings as controls: a patch past its hook, and a module that by the list is never imported."""
    found = json.loads(json.dumps(starts.found["worker"]))
    found["rows"]["memory.ledger"] = ["waiting", "its module was imported without our hook"]
    found["targets"].append("verl.utils.tracking")
    assert faults("worker", found) == [
        "row memory.ledger at verl.workers.megatron_workers:ActorRolloutRefWorker.init_model is waiting "
        "(its module was imported without our hook)",
        "worker imports verl.utils.tracking, which NEVER_IMPORTED lists",
    ]
