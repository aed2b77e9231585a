"""The modelled start: its phases are those that a run measures, and what a cold page cache costs."""

import json

import pytest

from tests.runs import composed
from verl_patches.config import hccl
from verl_patches.config.resolve import CONFIGS_DIR
from verl_patches.planning.start_plan import COMMUNICATOR_S, start_plan
from verl_patches.trainer.step_record import start_of_workers

TRUE = "deepseekv3_256die_true_weight"


def parts(plan, column="cold_s"):
    return {(row["phase"], row["part"]): row[column] for row in plan["phases"]}


@pytest.fixture(scope="module")
def run():
    return composed(TRUE)


def test_phases_are_those_of_a_runs_record_in_their_order(run):
    names = list(dict.fromkeys(row["phase"] for row in start_plan(run, 500.0, 700e9, 10.0)["phases"]))
    measured = start_of_workers([{}], [{"cpu_s": 0.0}])
    assert names == ["controller", "worker 0", *(name for name in measured if name != "cpu"), "step 1"]


def test_the_weights_are_read_once_by_all_ranks_and_faster_where_they_are_cached(run):
    """1.63 TB in bf16 (docs/weights.md), half of it in FP8; random init reads none."""
    plan = start_plan(run, 500.0, 700e9, 10.0)
    assert parts(plan)["models", "weights"] == pytest.approx(163, abs=1)
    faster = start_plan(run, 500.0, 700e9, 20.0)
    assert parts(faster)["models", "weights"] == pytest.approx(81.5, abs=1)
    assert plan["cold_s"] > plan["warm_s"] > 500 and parts(plan, "warm_s")["models", "weights"] < 10
    assert plan["cold_s"] == pytest.approx(sum(parts(plan).values()), abs=0.2)
    random = start_plan(composed("deepseekv3_256die_random_init"), 500.0, 700e9, 10.0)
    assert ("models", "weights") not in parts(random) and parts(random)["models", "graphs"] == 60


def test_fp8_weights_are_half_the_bytes(run, tmp_path):
    folder = tmp_path / "fp8"
    folder.mkdir()
    shape = json.loads((CONFIGS_DIR / "model" / "deepseekv3_671b.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "quantization_config": {"quant_method": "fp8"}}))
    plan = start_plan(composed(TRUE, [f"actor_rollout_ref.model.path={folder}"]), 500.0, 700e9, 10.0)
    assert parts(plan)["models", "weights"] == pytest.approx(81.5, abs=1)


def test_communicators_are_those_whose_buffers_the_memory_plan_counts(run):
    found = parts(start_plan(run, 500.0, 700e9, 10.0))
    for phase, side in (("models", "rollout"), ("step 1", "train")):
        made = sum(group.communicates for group in hccl.groups(run) if group.side == side)
        assert made > 3 and found[phase, "communicators"] == made * COMMUNICATOR_S
    fixed = start_plan(composed(TRUE, ["algo=sft"]), 500.0, 700e9, 10.0)
    assert not {("models", "engine"), ("models", "graphs")} & parts(fixed).keys()
