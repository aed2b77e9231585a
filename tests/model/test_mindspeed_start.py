"""Engine start on line a3: upstream's own parsers and validators see what our table makes of a configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_patches.config.compose import compose, hf_config_of

ACTOR = "actor_rollout_ref.actor.megatron."
TP2 = [f"{ACTOR}tensor_model_parallel_size=2", "recipe.train.expert_split=tp_extend_ep"]
PP2 = [f"{ACTOR}pipeline_model_parallel_size=2"]
RECOMPUTE = [*TP2, "actor_rollout_ref.model.enable_gradient_checkpointing=true"]
_KWARGS = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_"
FULL = [f"{_KWARGS}granularity=full", f"{_KWARGS}method=block", f"{_KWARGS}num_layers=2"]
SELECTIVE = [f"{_KWARGS}granularity=selective", f"{_KWARGS}method=block"]
FUSED = ["fused_linear_wgrad=true", "fused_expert_wgrad=true", "collective_timeout_minutes=45"]
OVERLAPS = ["grad_overlap=true", "grad_bucket_parameters=4000"]
TINY = "grpo_deepseekv3_tiny_cpu"
# name -> (configuration, ranks, overrides, what upstream says); the first is what the process is prepared for
CASES = {
    "base": (TINY, 2, TP2, None),
    "recompute": (TINY, 2, [*RECOMPUTE, *FULL], None),
    "layer_list": (TINY, 4, [*TP2, *PP2, "recipe.train.layers_per_stage=[1,3]"], None),
    "fused_wgrad": (TINY, 2, [*TP2, *(f"recipe.train.{key}" for key in FUSED)], None),
    "overlaps": (TINY, 2, [*TP2, *(f"recipe.train.{key}" for key in OVERLAPS)], None),
    "no_grouped_gemm": (TINY, 2, [*TP2, "recipe.train.grouped_gemm=false"],
                        "recipe.train.grouped_gemm is False: weights go by MindSpeed's stacked experts"),
    "too_many_stages": (TINY, 4, [*TP2, *PP2, "recipe.train.layers_per_stage=[1,1,2]"], "num_layer_list"),
    "too_long": (TINY, 2, [*TP2, "data.max_response_length=4096"], "upstream refuses"),
    "selective_with_method": (TINY, 2, [*RECOMPUTE, *SELECTIVE], "not yet supported for selective"),
    "three_ranks": (TINY, 3, TP2, "world size"),
    "too_few_ranks": (TINY, 1, TP2, "tensor_model_parallel_size: requested 2, got 1"),
    "bad_word": (TINY, 2, [*TP2, "actor_rollout_ref.actor.optim.warmup_style=sine"], "invalid choice: 'sine'"),
    "other_features": (TINY, 2, [*TP2, "recipe.train.fused_permute=false"],
                       "use_fused_moe_token_permute_and_unpermute True, now False"),
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.upstream]


@pytest.fixture(scope="module")
def run(a3_sources, run_ranks):
    """run(cases, early=None): what mindspeed_start.arguments finds."""
    sources = a3_sources()
    env = {"VERL_PATCHES": "line=a3,platform=cpu", "TORCHDYNAMO_DISABLE": "1"}
    options = {"env": env | {"PYTHONPATH": os.pathsep.join(map(str, sources))}, "fresh": True, "backend": None}
    job = "tests.model.mindspeed_start:arguments"
    return lambda cases, *early: run_ranks(job, _composed(cases, sources[0]), *early, **options)[0]


@pytest.fixture(scope="module")
def found(run):
    return run(CASES)


def _composed(cases: dict, verl: Path) -> dict[str, dict]:
    found = {}
    for name, (config_name, ranks, overrides, _) in cases.items():
        config = compose(config_name, overrides, verl_path=verl)
        section = OmegaConf.to_container(config.actor_rollout_ref, resolve=True)
        found[name] = {"world_size": ranks, "config": section, "hf": hf_config_of(config)}
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_upstream_refuses_in_its_own_words(found, name):
    assert isinstance(found[name], str), f"{name} was accepted"
    assert CASES[name][3] in found[name]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case[3]])
def test_upstream_takes_the_rest(found, name):
    assert isinstance(found[name], dict), found[name]


def test_fused_weight_gradients_and_the_timeout_arrive(found):
    names = ("gradient_accumulation_fusion", "gemm_gradient_accumulation_fusion", "distributed_timeout_minutes")
    assert [found["fused_wgrad"][name] for name in names] == [True, True, 45]
    assert [found["base"][name] for name in names] == [False, False, 30]


def test_overlaps_arrive(found):
    names = ("overlap_grad_reduce", "ddp_bucket_size")
    assert [found["overlaps"][name] for name in names] == [True, 4000]
    assert [found["base"].get(name) for name in names] == [False, None]


def test_upstream_takes_both_256_die_configs_as_they_are(run):
    """A process of their own: the adaptor reads some arguments once."""
    cases = {
        name: (f"grpo_deepseekv3_256die_{run}", 256, [], None)
        for name, run in (("base", "random_init"), ("learning", "true_weight"))
    }
    found = run(cases)
    assert all(isinstance(found[name], dict) for name in cases), found
    for argument in ("swap_optimizer", "moe_alltoall_overlap_comm", "gemm_gradient_accumulation_fusion"):
        assert [found[name][argument] for name in cases] == [True, True], argument
    assert [found[name]["fix_router"] for name in cases] == [True, False]
    layout = {"data_parallel_size": 8, "expert_model_parallel_size": 8, "moe_tp_extend_ep": True, "num_layers": 61}
    layout |= {"num_layer_list": "7,7,8,8,8,8,8,7", "recompute_num_layers": 8, "sequence_parallel": True}
    optimizer = {"moe_router_bias_update_rate": 0.0, "adam_beta2": 0.95, "clip_grad": 1.0}
    assert (layout | optimizer).items() <= found["learning"].items()


def test_megatron_before_mindspeed_is_refused(run):
    assert "megatron.core is imported already" in run({"base": CASES["base"]}, "megatron.core.parallel_state")


def test_what_the_adaptor_leaves_behind(found):
    assert found["compile_is_torchs"] and found["argv_is_ours"]
