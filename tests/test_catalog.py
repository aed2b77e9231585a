"""Test the patch table itself: valid, provable, and right about platforms."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from verl_patches.catalog import FUNCTIONAL, ROWS, all_rows, platform_rows
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import LINES
from verl_patches.patching.switches import Switches, parse_switches
from verl_patches.run.compose import compose

ROOT = Path(__file__).resolve().parent.parent
STAND_INS = [row for row in all_rows() if row not in ROWS]
PRELUDE = "import verl_patches.prelude_patch"


@pytest.fixture
def prelude(run_python):
    """Return prelude(platform, code, **env), which runs code; without a platform VERL_PATCHES is not set."""
    return lambda platform, code=PRELUDE, **env: run_python(
        code, patches=platform and f"line=pypi,platform={platform}", env=env
    )


@pytest.mark.parametrize("line", LINES)
def test_stand_ins_are_for_machines_without_an_accelerator(line):
    assert platform_rows("npu") == ROWS
    wanted = Engine(all_rows(), Switches(line, "npu")).wanted
    assert wanted and wanted.isdisjoint(row.id for row in STAND_INS)
    asked = Switches(line, "npu", tuple(f"+{row.id}" for row in STAND_INS))
    assert Engine(all_rows(), asked).wanted.isdisjoint(row.id for row in STAND_INS)
    for emulation in ("cpu", "npu_emulated"):
        own = {row.id for row in STAND_INS if line in row.lines and emulation in row.platforms}
        assert own <= Engine(platform_rows(emulation), Switches(line, emulation)).wanted


def test_a_platform_without_rows_is_refused_by_name():
    with pytest.raises(ConfigError, match="platform is 'cuda'; expected one of npu, cpu, npu_emulated"):
        compose("deepseekv3_tiny_cpu", ["recipe.platform=cuda"], platform_rows)
    with pytest.raises(ConfigError, match=r"cuda.* platform=npu\|cpu\|npu_emulated"):
        parse_switches("line=pypi,platform=cuda")


@pytest.mark.parametrize("platform", ["npu", None])
def test_missing_torch_npu_is_an_error_that_says_so(prelude, platform):
    done = prelude(platform)
    assert done.rc != 0 and "torch_npu is not installed" in done.err and "platform=cpu" in done.err


def test_an_unknown_row_in_the_switch_is_refused(prelude):
    done = prelude("cpu,-model.mla_k_pe_gard")
    assert done.rc != 0 and "nearest: model.mla_k_pe_grad" in done.err


@pytest.mark.parametrize(
    ("switches", "error", "row", "instead"),
    [
        *((Switches(line, "cpu", ("-update.sharding_manager", "-memory.[ol]*", "-update.tensor_cache")),
           r"reshard\.direct needs update\.sharding_manager", "reshard.direct", "-reshard.*") for line in LINES),
        (Switches("a3", "npu", ("-memory.order",)), r"memory\.ledger", "memory.ledger", "-memory.[ol]*"),
    ],
)  # fmt: skip
def test_a_row_without_the_rows_that_make_it_right_is_refused_and_can_be_off(switches, error, row, instead):
    """Check this because verl's own path would run unnoticed, or the ledger would expect memory that is not there."""
    with pytest.raises(ConfigError, match=error):
        Engine(ROWS, switches)
    assert row not in Engine(ROWS, replace(switches, patterns=(instead,))).wanted


@pytest.mark.slow
def test_every_provider_is_there_and_every_target_is_active(prelude):
    """Import everything that rows wait for in one fresh process; all rows must be active."""
    modules = {row.target_module for row in all_rows() if "pypi" in row.lines}
    modules = sorted(modules - {"verl.trainer.ppo.ray_trainer"})
    code = f"""
{PRELUDE}
import importlib
for name in {modules!r}: importlib.import_module(name)
import verl.trainer.ppo.ray_trainer
from verl_patches.patching.engine import current_engine
wrong = [r for r in current_engine().status() if r["id"] in current_engine().wanted and r["state"] != "active"]
assert not wrong, wrong
current_engine().verify("worker"); current_engine().verify("controller")
"""
    prelude("cpu", code, VLLM_USE_V1="0").check()


def test_functional_rows_reach_npus():
    """Check all but one: vllm-ascend's own MoE class replaces the class that rollout.fp32_router wraps."""
    assert [row.id for row in FUNCTIONAL if "npu" not in row.platforms] == ["rollout.fp32_router"]


def headings(text):
    """Return the levels of a page's headings in order, without lines in code blocks."""
    return re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs" / "zh").glob("*.md"))]
)
def test_a_page_and_its_chinese_twin_have_the_same_headings(page):
    twin = page.replace(".md", "_zh.md") if page == "README.md" else page.replace("docs/", "docs/zh/")
    levels = [headings((ROOT / name).read_text()) for name in (page, twin)]
    assert levels[0] == levels[1] and len(levels[0]) > 2
    assert headings("# a\n```bash\n# no heading\n```\n## b\n") == ["#", "##"]
