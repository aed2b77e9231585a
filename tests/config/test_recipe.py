from dataclasses import asdict

import pytest

from verl_patches.config.recipe import Recipe, check_recipe, recipe_keys
from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.arguments import TABLE


def test_train_has_the_keys_and_defaults_of_the_engine_table():
    table = {row.key: row.default for row in TABLE if row.key.startswith("recipe.train.")}
    train = {key: item.default for key, item in recipe_keys() if key.startswith("recipe.train.")}
    assert set(table) == set(train)
    given = {key: default for key, default in table.items() if default is not None}
    assert given == {key: train[key] for key in given}


def test_the_defaults_are_valid():
    check_recipe(asdict(Recipe()))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rolout": {"dp": 2}}, r"unknown key recipe\.rolout\.dp; did you mean recipe\.rollout\.dp"),
        ({"wieght_sync": 1}, r"unknown key recipe\.wieght_sync"),
        ({"rollout": {"tp": 2}}, r"unknown key recipe\.rollout\.tp"),
        ({"line": "main"}, "recipe.line is 'main'; expected one of pypi, a3"),
        ({"train": {"expert_split": "ep"}}, "expected one of etp, tp_extend_ep"),
        ({"logprob_check": {"action": "warn"}}, "expected one of stop, report, off"),
        ({"run": "../up"}, "plain folder name"),
        ({"rollout": {"dp": 0}}, "expected a whole number >= 1"),
        ({"ray_port": 80}, "from 1024 to 65535 or null"),
        ({"ray_port": 7000, "ray_address": "auto"}, "remove one of them"),
        ({"timeouts": {"wall_s": -1}}, "a number > 0 or null"),
        ({"patches": ["model.mla"]}, r"expected \+row\.id or -row\.id"),
        ({"platform": "cpu", "rollout": {"balanced_routing": True}}, "needs recipe.platform=npu, found cpu"),
        ({"hccl": {"base_port": 65500}}, "base_port is 65500; expected 1024 to 65392"),
        ({"hccl": {"expansion_mode": "HOST"}}, "expected one of AIV, AI_CPU"),
        ({"platform": "cpu", "hccl": {"buffer_mib": 300}}, "buffer_mib is Ascend.s: it needs recipe.platform=npu"),
        ({"platform": "cpu", "rollout": {"ascend": {"prefix_caching": False}}}, "prefix_caching is Ascend.s: it needs"),
        ({"rollout": {"ascend": {"multistream_moe": True}}}, "multistream_moe is True: it acts in graphs only"),
        ({"rollout": {"ascend": {"graphs": True, "kv_nz": True}}}, r"kv_nz is True; expected false: .*PR 3066"),
        ({"rollout": {"ascend": {"graphs": True, "graph_batch_sizes": [0]}}}, "a list, each a whole number >= 1"),
        ({"rollout": {"ascend": {"scheduler": "v0"}}}, "expected one of v1, ascend"),
        ({"platform": "cpu", "rollout": {"rebalance_every": 8, "dp": 2}}, "needs recipe.platform=npu, found cpu"),
        ({"platform": "npu", "rollout": {"rebalance_every": 8}}, "recipe.rollout.dp is 1"),
        ({"rollout": {"rebalance_every": 0}}, "rebalance_every"),
        ({"profile": {"steps": [0]}}, "a list, each a whole number >= 1 or null"),
        ({"profile": {"ranks": [-1]}}, "a list, each a whole number >= 0"),
        ({"profile": {"phases": ["update", "sync"]}}, "'sync' is no phase of memory/schedule.py; expected .* update"),
        ({"profile": {"phases": ["reward"]}}, "'reward' runs on the controller"),
        ({"profile": {"peak_tflops": 0}}, "a number > 0 or null"),
        ({"line": "pypi", "train": {"balanced_routing": True}}, "needs recipe.line=a3, found pypi"),
    ],
)
def test_wrong_keys_and_values_are_refused_by_name(section, message):
    with pytest.raises(ConfigError, match=message):
        check_recipe(section)


def test_all_faults_are_listed_at_once():
    with pytest.raises(ConfigError) as error:
        check_recipe({"line": "x", "platform": "y", "foo": 1})
    assert all(word in str(error.value) for word in ("recipe.line", "recipe.platform", "recipe.foo"))
