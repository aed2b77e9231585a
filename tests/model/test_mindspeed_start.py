"""Test the engine start on line a3: upstream's own parsers and validators take our table's arguments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.runs import composed, worker_section
from verl_patches.spec import Trees

ACTOR = "actor_rollout_ref.actor.megatron."
TP2 = [f"{ACTOR}tensor_model_parallel_size=2", "recipe.train.expert_split=tp_extend_ep"]
_MODEL = "actor_rollout_ref.model"
_KWARGS = f"{_MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_"
SELECTIVE = [
    f"{_MODEL}.enable_gradient_checkpointing=true",
    f"{_KWARGS}granularity=selective",
    f"{_KWARGS}method=block",
]
TINY = "deepseekv3_tiny_cpu"
# name -> (configuration, ranks, overrides, words of the refusal or None); the process is prepared for the first;
# test_mindspeed_parity.py and test_mindspeed_update.py test layer lists, fused gradients and overlaps
CASES = {
    "base": (TINY, 2, TP2, None),
    "too_long": (TINY, 2, [*TP2, "data.max_response_length=4096"], "refused by Megatron or MindSpeed"),
    "selective_with_method": (TINY, 2, [*TP2, *SELECTIVE], "not yet supported for selective"),
    "three_ranks": (TINY, 3, TP2, "world size"),
    "too_few_ranks": (TINY, 1, TP2, "tensor_model_parallel_size: requested 2, got 1"),
    "bad_word": (TINY, 2, [*TP2, "actor_rollout_ref.actor.optim.warmup_style=sine"], "invalid choice: 'sine'"),
}
pytestmark = [pytest.mark.slow, pytest.mark.upstream]


@pytest.fixture(scope="module")
def run(a3_sources, run_ranks):
    """Return run(cases, early=None), which returns the findings of mindspeed_start.arguments."""
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
        run = composed(config_name, ["recipe.line=a3", *overrides], Trees(verl=verl))
        section = OmegaConf.to_container(worker_section(run))
        found[name] = {"world_size": ranks, "config": section, "hf": dict(run.hf_config)}
    return found


@pytest.mark.parametrize("name", CASES)
def test_upstream_takes_it_or_refuses_in_its_own_words(found, name):
    words = CASES[name][3]
    assert isinstance(found[name], str if words else dict), found[name]
    assert words is None or words in found[name]


def test_upstream_takes_both_256_die_configs_as_they_are(run):
    """Run each in its own process: the adaptor reads some arguments once."""
    cases = {
        name: (f"deepseekv3_256die_{run}", 256, [], None)
        for name, run in (("base", "random_init"), ("learning", "true_weight"))
    }
    found = run(cases)
    assert all(isinstance(found[name], dict) for name in cases), found
    for argument in ("swap_optimizer", "moe_alltoall_overlap_comm", "gemm_gradient_accumulation_fusion"):
        assert [found[name][argument] for name in cases] == [True, True], argument
    assert [found[name]["fix_router"] for name in cases] == [True, False]
    layout = {"data_parallel_size": 8, "expert_model_parallel_size": 8, "moe_tp_extend_ep": True, "num_layers": 61}
    layout |= {"num_layer_list": "7,7,8,8,8,8,8,7", "recompute_method": "block", "sequence_parallel": True}
    optimizer = {"moe_router_bias_update_rate": 0.0, "adam_beta2": 0.95, "clip_grad": 1.0}
    assert (layout | optimizer).items() <= found["learning"].items()


def test_upstream_takes_the_presets_of_the_family_at_their_sizes(run):
    """Check the control too: 16 heads are refused for CP32."""
    ranks = {"moonlight_16die": 16, "moonlight_8die": 8, "moonlight_32die_8k": 32}
    ranks |= {"kimi_k2_192die": 192, "kimi_k2_256die": 256, "deepseekv3_256die_16k": 256}
    cases = {name: (name, size, [], None) for name, size in ranks.items()}
    control = ("moonlight_32die_8k", 32, [f"{ACTOR}context_parallel_size=32"], None)
    found = run({"base": cases["moonlight_16die"], **cases, "control": control})
    assert "num_attention_heads" in found["control"]
    assert all(isinstance(found[name], dict) for name in cases), found
    moonlight, kimi = found["moonlight_16die"], found["kimi_k2_192die"]
    sizes = {"q_lora_rank": 2048, "rope_scaling_factor": 1.0, "num_experts": 64, "n_shared_experts": 2, "n_group": 1}
    assert (sizes | {"expert_model_parallel_size": 16, "padded_vocab_size": 163_840}).items() <= moonlight.items()
    assert {"q_lora_rank": 1536, "rope_scaling_factor": 32.0, "num_experts": 384}.items() <= kimi.items()
    assert {found[name]["context_parallel_size"] for name in ("moonlight_32die_8k", "deepseekv3_256die_16k")} == {2}


def test_megatron_before_mindspeed_is_refused(run):
    assert "megatron.core is imported already" in run({"base": CASES["base"]}, "megatron.core.parallel_state")


def test_what_the_adaptor_leaves_behind(found):
    assert found["compile_is_torchs"] and found["argv_is_ours"]
