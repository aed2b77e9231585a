"""Test that one place writes recipe.rollout.ascend where vllm-ascend reads it, and other places are refused."""

import re

import pytest
from omegaconf import OmegaConf

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.recipe import RolloutAscend, recipe_keys
from verl_patches.run.compose import compose_config
from verl_patches.run.engine_options import ASCEND_KEY, OPTION_PATHS, OPTIONS_KEY, ROLLOUT_KEY
from verl_patches.run.environment import worker_environment

TINY, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"
NPU = ["recipe.line=a3", "recipe.platform=npu_emulated"]


def options(name, *overrides):
    return OmegaConf.select(compose_config(name, overrides), OPTIONS_KEY)


def test_every_key_is_written_to_one_place_or_is_a_variable():
    keys = {key.rpartition(".")[2] for key, _ in recipe_keys() if key.startswith(f"{ASCEND_KEY}.")}
    assert keys == OPTION_PATHS.keys() | {"top_k_optimize", "mla_pa"}
    assert len(set(OPTION_PATHS.values())) == len(OPTION_PATHS)
    assert set(re.findall(r"^    ([a-z_]+): .*$", RolloutAscend.__doc__, re.MULTILINE)) >= keys


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("multistream_mla=false", "torchair_graph_config.enable_multistream_mla", False),
        ("graph_batch_sizes=[32,64]", "torchair_graph_config.graph_batch_sizes", [32, 64]),
        ("chunked_prefill_for_mla=true", "chunked_prefill_for_mla", True),
    ],
)
def test_a_key_changes_its_own_place_only(override, place, value):
    before, after = options(LARGE), options(LARGE, f"{ASCEND_KEY}.{override}")
    assert OmegaConf.select(after, place) == value != OmegaConf.select(before, place)
    OmegaConf.update(after, place, OmegaConf.select(before, place))
    assert after == before


def test_graphs_decide_verls_two_keys_and_the_default_sizes():
    rollout = compose_config(LARGE).actor_rollout_ref.rollout
    assert not rollout.enforce_eager and not rollout.free_cache_engine
    assert options(LARGE).torchair_graph_config.graph_batch_sizes == [rollout.engine_kwargs.vllm.max_num_seqs] == [64]
    for name, sizes in ((LARGE, [8, 16, 32, 64]), ("deepseekv3_256die_random_init", [64])):  # which ignores end tokens
        assert options(name, "level=tuned").torchair_graph_config.graph_batch_sizes == sizes
    eager = compose_config(TINY, NPU).actor_rollout_ref.rollout
    assert eager.enforce_eager and eager.free_cache_engine
    assert eager.engine_kwargs.vllm.additional_config.torchair_graph_config.graph_batch_sizes == []
    assert "additional_config" not in compose_config(TINY).actor_rollout_ref.rollout.engine_kwargs.vllm  # on a CPU


def test_expandable_segments_are_for_engines_without_vllms_sleep_mode():
    name, row_off = "PYTORCH_NPU_ALLOC_CONF", "recipe.patches=[-memory.sleep_mode]"
    assert worker_environment(composed(LARGE, [row_off]))[name] == "expandable_segments:False"
    assert worker_environment(composed(LARGE))[name] == "expandable_segments:True"
    assert worker_environment(composed(TINY, NPU))[name] == "expandable_segments:True"  # the tiny config is eager


@pytest.mark.parametrize(("override", "words"), [
    *((f"++{OPTIONS_KEY}.{place}=1", f"{place} .*{ASCEND_KEY}.{key}") for key, place in OPTION_PATHS.items()),
    (f"++{OPTIONS_KEY}.torchair_graph_config.enabled=null", f"enabled .*{ASCEND_KEY}.graphs"),  # null counts as given
    (f"{ROLLOUT_KEY}.enforce_eager=true", f"enforce_eager: expected no override.*{ASCEND_KEY}.graphs"),
    (f"{ROLLOUT_KEY}.free_cache_engine=true", f"free_cache_engine: expected no override.*{ASCEND_KEY}.graphs"),
])  # fmt: skip
def test_the_same_option_elsewhere_is_refused_on_npu(override, words):
    with pytest.raises(ConfigError, match=words):
        compose_config(LARGE, [override])


def test_other_options_of_vllm_ascend_and_those_of_a_cpu_pass():
    found = options(
        LARGE, f"+{OPTIONS_KEY}.torchair_graph_config.use_cached_graph=true", f"+{OPTIONS_KEY}.refresh=true"
    )
    compose_config(TINY, [f"{ROLLOUT_KEY}.enforce_eager=true", f"{ROLLOUT_KEY}.free_cache_engine=true"])  # on a CPU
    assert found.refresh and found.torchair_graph_config.use_cached_graph and found.torchair_graph_config.enabled
