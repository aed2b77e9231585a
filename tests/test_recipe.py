import pytest

from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.arguments import TABLE
from verl_patches.recipe import recipe_keys
from verl_patches.run.verl_values import check_recipe


def test_train_has_the_keys_and_defaults_of_the_engine_table():
    table = {row.key: row.default for row in TABLE if row.key.startswith("recipe.train.")}
    train = {key: item.default for key, item in recipe_keys() if key.startswith("recipe.train.")}
    assert set(table) == set(train)
    given = {key: default for key, default in table.items() if default is not None}
    assert given == {key: train[key] for key in given}


@pytest.mark.parametrize(
    ("section", "message"),
    [  # tests/run/test_values.py tests the types of values
        ({"rolout": {"dp": 2}}, r"recipe\.rolout\.dp; did you mean recipe\.rollout\.dp"),
        ({"run": "../up"}, "recipe.run"),
        ({"ray_port": 7000, "ray_address": "auto"}, "ray_address"),
        ({"platform": "cpu", "rollout": {"balanced_routing": True}}, "balanced_routing.*recipe.platform=npu"),
        ({"line": "pypi", "train": {"balanced_routing": True}}, "balanced_routing.*recipe.line=a3"),
        ({"rollout": {"ascend": {"multistream_moe": True}}}, "multistream_moe is True"),
        ({"rollout": {"ascend": {"graphs": True, "kv_nz": True}}}, "kv_nz is True"),
        ({"platform": "npu", "rollout": {"rebalance_every": 8}}, "recipe.rollout.dp is 1"),
    ],
)
def test_wrong_keys_and_values_are_refused_by_name(section, message):
    with pytest.raises(ConfigError, match=message):
        check_recipe(section)


def test_all_faults_are_listed_at_once():
    with pytest.raises(ConfigError) as error:
        check_recipe({"line": "x", "platform": "y", "foo": 1})
    assert all(word in str(error.value) for word in ("recipe.line", "recipe.platform", "recipe.foo"))
