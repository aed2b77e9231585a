"""A configuration of verl alone gets the recipe that rows read, from the schema, the switches and what a user adds."""

import pytest
from omegaconf import OmegaConf

from verl_patches.cluster.compose import VERL_CONFIG, verl_config_dir
from verl_patches.cluster.import_alone import fill_recipe
from verl_patches.cluster.recipe import Recipe, recipe_keys
from verl_patches.errors import ConfigError
from verl_patches.patching.switches import parse

CPU = parse("line=pypi,platform=cpu,drift=warn,-memory.order")


def config(of_rollout="bfloat16", **recipe):
    """verl's own configuration as its main has it: closed to new keys, resolved."""
    found = OmegaConf.load(verl_config_dir() / f"{VERL_CONFIG}.yaml")
    found.actor_rollout_ref.rollout.dtype = of_rollout
    if recipe:
        found.recipe = recipe
    OmegaConf.resolve(found)
    OmegaConf.set_struct(found, True)
    return found


def test_without_a_recipe_rows_find_defaults_and_no_run_to_record():
    filled = config()
    fill_recipe(filled, CPU)
    decided = {"run": None, "line": "pypi", "platform": "cpu", "patches": ["-memory.order"], "drift": "warn",
               "dtype": "bf16"}
    assert OmegaConf.to_container(filled.recipe) == {**OmegaConf.to_container(OmegaConf.structured(Recipe)), **decided}
    assert filled.actor_rollout_ref.recipe == filled.recipe and len(filled.recipe) > len(decided)
    assert all(OmegaConf.select(filled, key) == item.default for key, item in recipe_keys()
               if key.startswith("recipe.train."))


def test_the_dtype_is_the_rollouts_and_other_ones_are_refused():
    filled = config("float32")
    fill_recipe(filled, CPU)
    assert filled.recipe.dtype == "fp32"
    with pytest.raises(ConfigError, match="float16"):
        fill_recipe(config("float16"), CPU)


def test_what_a_user_adds_goes_over_the_defaults():
    filled = config(run="mine", logprob_check={"action": "report"})
    fill_recipe(filled, CPU)
    assert filled.recipe.run == "mine" and filled.recipe.logprob_check.action == "report"
    assert filled.recipe.logprob_check.max_mean_bf16 == Recipe().logprob_check.max_mean_bf16


@pytest.mark.parametrize(("recipe", "said"), [
    ({"line": "a3"}, ["recipe.line is 'a3'", "VERL_PATCHES"]), ({"dtype": "fp32"}, ["recipe.dtype", "rollout.dtype"]),
    ({"patches": ["-reshard.direct"]}, ["recipe.patches", "-memory.order"]), ({"typo": 1}, ["typo"]),
    ({"memory": {"ledger": "loud"}}, ["recipe.memory.ledger", "strict"]),
    ({"rollout": {"dp": 2}}, ["rollout layout"]), ({"tensor_cache": {"enabled": True}, "rollout": {"replay": "x"}},
                                                   ["recipe.tensor_cache.enabled"])])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(recipe, said):
    with pytest.raises(ConfigError) as refused:
        fill_recipe(config(**recipe), CPU)
    assert all(word in str(refused.value) for word in said), refused.value
