"""The table from verl's configuration to Megatron and MindSpeed arguments; no upstream source is needed."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from verl_patches.config.compose import CONFIGS_DIR, compose
from verl_patches.config.recipe import recipe_keys
from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.arguments import SECTIONS, TABLE, arguments_of, explain

ACTOR, OPTIM = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.actor.optim."
REF = "actor_rollout_ref.ref.megatron."
CP = [f"{ACTOR}context_parallel_size=2"]


def _words(config) -> list[str]:
    return arguments_of(explain(config))


def _value(words: list[str], argument: str) -> str:
    return words[words.index(argument) + 1]


def _tiny(*overrides: str):
    return compose("grpo_deepseekv3_tiny_cpu", overrides)


@pytest.fixture(scope="module")
def die256():
    return compose("grpo_deepseekv3_256die_true_weight")


def test_table_names_each_key_once_and_knows_every_recipe_key():
    keys = [row.key for row in TABLE]
    assert len(keys) == len(set(keys))
    assert {key for key, _ in recipe_keys() if key.startswith("recipe.train.")} <= set(keys)


def test_every_key_of_the_sections_has_a_row(die256):
    rows = explain(die256)
    assert not [row for row in rows if row.how == "refused"]
    for name in SECTIONS[:4]:
        section = OmegaConf.select(die256.actor_rollout_ref, name)
        assert {f"{name}.{key}" for key in section} <= {row.key for row in rows}


def test_unknown_key_is_refused_not_dropped(die256):
    changed = die256.copy()
    changed.actor_rollout_ref.actor.megatron["overlap_everything"] = True
    with pytest.raises(ConfigError, match="actor.megatron.overlap_everything is True: TABLE of .* does not map it"):
        _words(changed)


@pytest.mark.parametrize("name", ["grpo_deepseekv3_256die_random_init", "grpo_deepseekv3_256die_true_weight"])
def test_256_dies(name):
    config = compose(name)
    hf = {**json.loads((CONFIGS_DIR / config.recipe.model_shape).read_text()), "num_nextn_predict_layers": 0}
    words = arguments_of(explain(config, hf))
    expected = (
        "--expert-model-parallel-size 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 "  # 32 / TP 4
        "--num-layer-list 7,7,8,8,8,8,8,7 --recompute-granularity full --recompute-num-layers 8 --seq-length 4096 "
        "--lr 1e-06"
    ).split()
    assert {name: _value(words, name) for name in expected[::2]} == dict(
        zip(expected[::2], expected[1::2], strict=True)
    )
    flags = "moe-tp-extend-ep moe-grouped-gemm moe-permutation-async-comm swap-optimizer sequence-parallel bf16"
    assert {f"--{flag}" for flag in [*flags.split(), "use-distributed-optimizer"]} <= set(words)


def test_worker_section_says_the_same_as_the_whole_configuration(die256):
    assert _words(die256.actor_rollout_ref) == _words(die256)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{ACTOR}virtual_pipeline_model_parallel_size=2"], "virtual_pipeline_model_parallel_size is 2"),
        ([*CP, "recipe.train.use_remove_padding=false"], "parts are those of packed sequences"),
        (["recipe.train.use_remove_padding=false", "recipe.train.router_bias_update_rate=0.001"], "count as tokens"),
        ([*CP, "recipe.train.routing_replay=R2"], "the experts of its own part of a micro batch"),
        ([*CP, "data.max_response_length=9"], "to be a multiple of it"),
        ([*CP, f"{REF}context_parallel_size=1"], "ref.megatron.context_parallel_size is 1: must equal"),
        ([f"{ACTOR}use_dist_checkpointing=true"], "stacked experts"),
        ([f"+{ACTOR}override_transformer_config.num_layers_in_first_pipeline_stage=1"], "recipe.train"),
        ([f"{ACTOR}tensor_model_parallel_size=2"], "cuts each expert by TP 2"),
        ([f"{ACTOR}tensor_model_parallel_size=2", f"{ACTOR}sequence_parallel=false",
          "recipe.train.expert_split=tp_extend_ep"], "loses part of the rotary key's gradient"),
        ([f"{ACTOR}tensor_model_parallel_size=2", f"{ACTOR}expert_model_parallel_size=1",
          "recipe.train.expert_split=tp_extend_ep"], "a multiple of TP 2"),
        ([f"{ACTOR}tensor_model_parallel_size=2", f"{ACTOR}expert_tensor_parallel_size=2",
          "recipe.train.expert_split=tp_extend_ep"], "keeps experts whole"),
        (["recipe.train.swap_optimizer=true", f"{ACTOR}optimizer_offload=true", "recipe.dtype=bf16"],
         "on the host already"),
        (["recipe.train.swap_optimizer=true"], "no states for fp32 weights"),
        (["recipe.train.param_overlap=true"], "computes with old weights"),
        (["recipe.train.grad_bucket_parameters=9"], "all gradients are one bucket"),
        (["recipe.train.collective_timeout_minutes=0"], "collective_timeout_minutes is 0"),
        (["recipe.train.grouped_gemm=false"], "recipe.train.grouped_gemm is False: weights go by MindSpeed's stacked"),
        ([f"{REF}sequence_parallel=false"], "ref.megatron.sequence_parallel is False: must equal"),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=true"], "must be full or selective"),
        ([f"{OPTIM}total_training_steps=4", f"{OPTIM}lr_warmup_steps=4"], "warm-up"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_its_reason(overrides, said):
    with pytest.raises(ConfigError, match=said):
        _words(_tiny(*overrides))


def test_context_parallelism_is_ulysses_and_says_nothing_that_validators_forbid_with_it():
    words = _words(_tiny(*CP))
    assert _value(words, "--context-parallel-size") == "2"
    assert _value(words, "--context-parallel-algo") == "ulysses_cp_algo"
    assert "--variable-seq-lengths" not in words and "--variable-seq-lengths" in _words(_tiny())


def test_explain_does_not_raise():
    rows = explain(_tiny(f"{ACTOR}virtual_pipeline_model_parallel_size=2"))
    assert [row.key for row in rows if row.how == "refused"] == ["actor.megatron.virtual_pipeline_model_parallel_size"]


def test_learning_rate_schedule():
    settings = "warmup_style=cosine lr_warmup_steps_ratio=0.1 min_lr_ratio=0.5 total_training_steps=50 lr=1e-3"
    words = _words(_tiny(*(f"{OPTIM}{setting}" for setting in settings.split())))
    expected = {"--lr-decay-style": "cosine", "--lr-warmup-iters": "5", "--min-lr": "0.0005", "--lr-decay-iters": "50"}
    assert {argument: _value(words, argument) for argument in expected} == expected


@pytest.mark.parametrize(("override", "argument", "by_default"), [
    ("recipe.train.fused_expert_wgrad=true", "--gemm-gradient-accumulation-fusion", False),
    ("recipe.train.unpadded_attention=true", "--mla-fa-without-pad", False),
    ("recipe.train.fused_linear_wgrad=true", "--no-gradient-accumulation-fusion", True),
    ("recipe.dtype=bf16", "--router-gating-in-fp32", False),
    ("recipe.train.collective_timeout_minutes=90", "--distributed-timeout-minutes 90", False),
])  # fmt: skip
def test_a_setting_switches_its_argument(override, argument, by_default):
    assert (argument in " ".join(_words(_tiny()))) is by_default
    assert (argument in " ".join(_words(_tiny(override)))) is not by_default


def test_experts_by_tp_as_megatron_does():
    words = _words(_tiny(f"{ACTOR}tensor_model_parallel_size=2", f"{ACTOR}expert_tensor_parallel_size=2"))
    assert _value(words, "--expert-model-parallel-size") == "2"
    assert "--moe-tp-extend-ep" not in words


def test_explaining_needs_no_torch(run_python):
    run_python("import sys, verl_patches.model.mindspeed.arguments; sys.exit('torch' in sys.modules)").check()
