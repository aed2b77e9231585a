import pytest

from verl_patches.errors import ConfigError
from verl_patches.recipe import recipe_keys
from verl_patches.run.compose import compose_config
from verl_patches.run.verl_values import check_recipe
from verl_patches.values import RENAMED_KEYS


@pytest.mark.parametrize(
    ("section", "message"),
    [  # tests/run/test_values.py tests the types of values
        (
            {"rolout": {"data_parallel_size": 2}},
            r"recipe\.rolout\.data_parallel_size; did you mean recipe\.rollout\.data_parallel_size",
        ),
        ({"run": "../up"}, "recipe.run"),
        ({"platform": "cpu", "rollout": {"balanced_routing": True}}, "balanced_routing.*recipe.platform=npu"),
        ({"line": "pypi", "train": {"balanced_routing": True}}, "balanced_routing.*recipe.line=a3"),
        ({"rollout": {"ascend": {"multistream_moe": True}}}, "multistream_moe is True"),
        ({"rollout": {"ascend": {"graphs": True, "kv_nz": True}}}, "kv_nz is True"),
    ],
)
def test_wrong_keys_and_values_are_refused_by_name(section, message):
    with pytest.raises(ConfigError, match=message):
        check_recipe(section)


def test_all_faults_are_listed_at_once():
    with pytest.raises(ConfigError) as error:
        check_recipe({"line": "x", "platform": "y", "foo": 1})
    assert all(word in str(error.value) for word in ("recipe.line", "recipe.platform", "recipe.foo"))


def test_a_renamed_key_is_refused_with_its_new_name():
    keys = {key for key, _ in recipe_keys()}
    for old, new in RENAMED_KEYS.items():
        assert old not in keys and any(key == new or key.startswith(f"{new}.") for key in keys)
        for override in (f"{old}=1", f"+{old}=1"):
            with pytest.raises(ConfigError, match=rf"unknown key {old}; .*: write {new}$"):
                compose_config("deepseekv3_tiny_cpu", [override])
    with pytest.raises(ConfigError, match="write recipe.filter_groups"):  # a section of a file
        check_recipe({"keep_groups": {"metric": "score"}})
