"""Test that a run applies its line's and platform's rows without disabled features; the launcher ships their ids."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.patching.world import row
from verl_patches.__main__ import app
from verl_patches.catalog import ROWS, all_rows, platform_rows
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import ROLES
from verl_patches.patching.switches import PATCHES_VAR, Switches, parse_switches
from verl_patches.run.compose import compose
from verl_patches.run.environment import environment_variables
from verl_patches.run.features import feature_states, needed_rows
from verl_patches.run.resolve import changed_run

GRPO = "deepseekv3_256die_true_weight"
ON_POLICY, ASCEND = "recipe.train.skip_old_log_prob", "recipe.rollout.ascend"
# keys of a 256-die GRPO run, and the features that they switch on or off
CHANGES = [
    ({"algorithm.adv_estimator": "gae"}, {"critic", "value_models"}),
    ({"actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True}, {"dynamic_batches"}),
    ({"recipe.objective.name": "dpo", ON_POLICY: False}, {"fixed_data"}),
    ({f"{ASCEND}.graphs": False}, {"graphs"}),
    ({"recipe.memory.ledger": "off"}, {"memory_ledger"}),
    ({ON_POLICY: False}, {"on_policy"}),
    ({"recipe.trust_remote_code": True}, {"remote_code"}),
    ({"recipe.rewards": [{"name": "reward_model", "path": "/models/rm"}]}, {"reward_models", "value_models"}),
    ({"recipe.train.routing_replay": "R2"}, {"routing_replay"}),
    ({"recipe.hccl.small_groups_mib": None}, {"small_groups"}),
    ({"recipe.tensor_cache.enabled": False}, {"tensor_cache"}),
]


@pytest.fixture(scope="module")
def grpo():
    return compose(GRPO, ["level=tuned"], platform_rows)


@pytest.mark.parametrize(("updates", "features"), CHANGES, ids=[next(iter(updates)) for updates, _ in CHANGES])
def test_a_key_switches_its_feature(grpo, updates, features):
    before, after = feature_states(grpo), feature_states(changed_run(grpo, updates))
    assert {name for name in before if before[name] != after[name]} == features


def test_rows_name_every_feature_and_no_other(grpo):
    assert {spec.feature for spec in all_rows()} - {""} == feature_states(grpo).keys()
    assert set().union(*(features for _, features in CHANGES)) == feature_states(grpo).keys()


def test_a_256_die_run_applies_no_row_of_a_feature_that_is_off(grpo):
    """Check also that its processes read the same rows from the launcher's variables."""
    states = feature_states(grpo)
    (shipped,) = (variable.value for variable in environment_variables(grpo) if variable.name == PATCHES_VAR)
    switches = parse_switches(shipped)
    assert switches.text() == shipped and Engine(ROWS, switches).wanted == grpo.rows
    here = [spec for spec in ROWS if grpo.switches.decide(spec)[0]]
    off = {spec.id: switches.decide(spec)[1] for spec in here if spec.id not in grpo.rows}
    assert off == {s.id: f"feature {s.feature} is off" for s in here if s.feature and not states[s.feature]}
    assert {"update.recipe_critic", "update.routing_samples", "reward.models"} <= off.keys()
    # the import alone applies the rows of all features
    assert Engine(ROWS, grpo.switches).wanted == {spec.id for spec in here} > grpo.rows


def test_rows_of_speed_are_on_at_level_tuned_only(grpo):
    speed = {spec.id for spec in ROWS if spec.role == "speed"}
    assert len(speed) > 3 and speed <= grpo.rows
    needed = {"memory.empty_cache"}  # by memory.order
    for level in ("safe", "reference"):
        run = compose(GRPO, [f"level={level}", "recipe.patches=[+dispatch.put_once]"], platform_rows)
        assert run.rows & speed == needed | {"dispatch.put_once"}
        others = {name for name, on in feature_states(grpo).items() if on and not feature_states(run)[name]}
        assert others <= {"small_groups", "tensor_cache"}  # keys of the levels
        assert {s.id for s in ROWS if s.id in grpo.rows and s.feature not in others} - speed <= run.rows
    collector = next(s for s in ROWS if s.id == "rollout.no_collector")
    assert run.process_switches.decide(collector) == (False, "the level is not tuned")


A, B = row("t.a", feature="one"), row("t.b", needs=("t.a",), feature="two")
C, OTHER_LINE = row("t.c"), row("t.d", lines=frozenset({"a3"}))
HERE = Switches("pypi", "cpu")


@pytest.mark.parametrize(
    ("features", "patterns", "expected"),
    [
        ((), (), {"t.c"}),
        (("one",), (), {"t.a", "t.c"}),
        (("two",), (), {"t.a", "t.b", "t.c"}),  # with the row that it needs
        ((), ("+t.b",), {"t.a", "t.b", "t.c"}),
        (("one",), ("-t.[ac]",), set()),
        (("two",), ("-t.a",), {"t.b", "t.c"}),  # which the engine refuses
    ],
)
def test_rows_that_a_run_needs(features, patterns, expected):
    rows = (A, B, C, OTHER_LINE)
    found = needed_rows(rows, features, replace(HERE, patterns=patterns))
    assert found == expected
    taken = replace(HERE, patterns=patterns, rows=tuple(found))
    assert {spec.id for spec in rows if taken.decide(spec)[0]} == expected


def test_status_has_a_table_for_each_role():
    printed = CliRunner().invoke(app, ["status", "--switches", "line=a3,platform=npu,rows=rollout.engine"]).stdout
    titles = [line for line in printed.splitlines() if line.startswith("patches for line=a3,platform=npu, ")]
    counts = Counter(spec.role for spec in ROWS)
    assert titles == [f"patches for line=a3,platform=npu, {role}: {counts[role]} rows" for role in ROLES]
    assert re.search(r"rollout.engine +waiting", printed) and "feature critic is off" in printed
