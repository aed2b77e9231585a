"""The table itself: valid, provable, honest about platforms, and the same in the READMEs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_patches.catalog import FUNCTIONAL, ROWS, STAND_INS
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.fingerprint import fingerprint, reviewed
from verl_patches.patching.switches import Switches
from verl_patches.platform.cpu import rows_megatron, rows_torch, rows_vllm

ROOT = Path(__file__).resolve().parent.parent
PRELUDE = "import verl_patches.prelude_patch"


def prelude(platform, code=PRELUDE, **env):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, env={
        "PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **({"VERL_PATCHES": f"line=pypi,platform={platform}"} if platform else {}), **env})


@pytest.mark.parametrize("platform", ["npu", "cuda"])
def test_stand_ins_are_for_cpu_only(platform):
    wanted = Engine(ROWS, Switches("pypi", platform)).wanted
    assert wanted and wanted.isdisjoint(row.id for row in STAND_INS)
    asked = Switches("pypi", platform, tuple(f"+{row.id}" for row in STAND_INS))
    assert Engine(ROWS, asked).wanted.isdisjoint(row.id for row in STAND_INS)
    assert {row.id for row in STAND_INS} <= Engine(ROWS, Switches("pypi", "cpu")).wanted


@pytest.mark.slow
def test_on_cuda_the_prelude_leaves_torch_alone():
    code = f"{PRELUDE}\nimport torch\nassert torch.cuda.is_available.__module__ == 'torch.cuda', 'patched'"
    assert prelude("cuda", code).returncode == 0
    assert "patched" in prelude("cpu", code).stderr


@pytest.mark.parametrize("platform", ["npu", None])
def test_missing_torch_npu_is_an_error_that_says_so(platform):
    done = prelude(platform)
    assert done.returncode != 0 and "torch_npu is not installed" in done.stderr and "platform=cpu" in done.stderr


def test_an_unknown_row_in_the_switch_is_refused():
    done = prelude("cpu,-model.mla_k_pe_gard")
    assert done.returncode != 0 and "nearest: model.mla_k_pe_grad" in done.stderr
    with pytest.raises(ConfigError):
        Engine(ROWS, Switches("pypi", "cpu", ("-no.such",)))


def test_every_body_is_the_reviewed_one():
    known = reviewed()["pypi"]
    for row in ROWS:
        if not row.is_module_stub:
            assert known.get(row.target) == fingerprint(row.target), row.id
    assert set(known) == {row.target for row in ROWS if not row.is_module_stub}


def test_every_row_is_named_by_a_test():
    """Rows of the three tables are tested table-wise: their own tests assert that no row of the table is left out."""
    tables = {row.id for rows in (rows_torch, rows_megatron, rows_vllm) for row in rows.ROWS}
    text = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py") if p.name != "test_catalog.py")
    assert [row.id for row in ROWS if row.id not in text and row.id not in tables] == []


@pytest.mark.slow
def test_every_provider_is_there_and_every_target_is_active(tmp_path):
    """Import everything that rows wait for in one fresh process; all rows must say active."""
    modules = sorted({row.target_module for row in ROWS} - {"verl.trainer.ppo.ray_trainer"})
    code = f"""
{PRELUDE}
import importlib
for name in {modules!r}: importlib.import_module(name)
import verl.trainer.ppo.ray_trainer
from verl_patches.patching.engine import current
wrong = [r for r in current().status() if r["state"] != "active"]
assert not wrong, wrong
current().verify("worker"); current().verify("controller")
"""
    done = prelude("cpu", code, VLLM_USE_V1="0", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]


def test_functional_rows_reach_npus():
    assert all("npu" in row.platforms for row in FUNCTIONAL)


@pytest.mark.parametrize("name", ["README.md", "README_zh.md"])
def test_patch_table_of_the_readme_is_the_catalogues(name):
    sys.path.insert(0, str(ROOT / "scripts"))
    import patch_table

    assert name not in patch_table.stale()
    assert all(f"| `{row.id}` |" in (ROOT / name).read_text() for row in ROWS)


def test_both_readmes_have_the_same_headings():
    levels = [re.findall(r"^(#+) ", (ROOT / name).read_text(), re.M) for name in ("README.md", "README_zh.md")]
    assert levels[0] == levels[1] and len(levels[0]) > 8
