"""Test Megatron's and MindSpeed-LLM's arguments from verl's configuration and config.json; needs no upstream."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from tests.runs import composed, worker_section
from verl_patches.catalog import platform_rows
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import REQUIRED_VALUES
from verl_patches.model.mindspeed.arguments import (
    IGNORED_KEYS,
    SIZE_ARGUMENTS,
    TABLE,
    command_line_arguments,
    engine_settings,
    model_settings,
)
from verl_patches.model.tiny import CONFIG_FILE
from verl_patches.plan.memory_plan import LAYERS_KEY, recompute_keys
from verl_patches.recipe import recipe_keys
from verl_patches.run.compose import compose

ACTOR, OPTIM = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.actor.optim."
HF = json.loads(CONFIG_FILE.read_text())
FULL = [f"++{key}={value}" for key, value in recompute_keys(0).items() if key != LAYERS_KEY]
CP = [f"{ACTOR}context_parallel_size=2"]


def _words(run) -> list[str]:
    return command_line_arguments(engine_settings(run.verl.actor_rollout_ref, run.recipe))


def _tiny(*overrides: str):
    return compose("deepseekv3_tiny_cpu", ["trainer.n_gpus_per_node=4", *overrides], platform_rows)


@pytest.fixture(scope="module")
def die256():
    return composed("deepseekv3_256die_true_weight", [f"{LAYERS_KEY}=8"])


def test_table_names_each_key_once_and_knows_every_recipe_key():
    keys = [row.key for row in TABLE]
    assert len(keys) == len(set(keys))
    # the engine has none of them
    own = {"skip_old_log_prob", "importance_ratio", "routing_replay", "max_skipped_steps"}
    train = {key for key, _ in recipe_keys() if key.startswith("recipe.train.")}
    assert train - {f"recipe.train.{name}" for name in own} == {key for key in keys if key.startswith("recipe.train.")}


def test_unknown_key_is_refused_not_dropped(die256):
    changed = worker_section(die256)
    changed.actor.megatron["overlap_everything"] = True
    with pytest.raises(ConfigError, match="actor.megatron.overlap_everything is True: unknown key"):
        command_line_arguments(engine_settings(changed, die256.recipe))


@pytest.mark.parametrize("name", ["deepseekv3_256die_random_init", "deepseekv3_256die_true_weight"])
def test_256_dies(name):
    run = composed(name, ["level=tuned"])
    words = command_line_arguments(engine_settings(run.verl.actor_rollout_ref, run.recipe, run.hf_config))
    for expected in (  # EP: 32 / TP 4
        "expert-model-parallel-size 8",
        "tensor-model-parallel-size 4",
        "pipeline-model-parallel-size 8",
        "num-layer-list 7,7,8,8,8,8,8,7",
        "recompute-granularity full",
        f"recompute-num-layers {max(OmegaConf.select(run.verl, LAYERS_KEY))}",  # start.py sets each stage's own number
        "seq-length 4096",
        "lr 1e-06",
        "moe-tp-extend-ep",
        "moe-grouped-gemm",
        "moe-permutation-async-comm",
        "swap-optimizer",
        "sequence-parallel",
        "bf16",
        "use-distributed-optimizer",
    ):
        assert f" --{expected} " in f" {' '.join(words)} "


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ACTOR}pipeline_model_parallel_size=2", f"{ACTOR}virtual_pipeline_model_parallel_size=2"],
         "virtual_pipeline_model_parallel_size is 2"),
        ([*CP, "recipe.train.routing_replay=R2"], "the experts of its own part of a micro batch"),
        ([*CP, "data.max_response_length=9"], "must be a multiple of it"),
        ([f"{ACTOR}use_dist_checkpointing=true"], "stacked experts"),
        ([f"+{ACTOR}override_transformer_config.num_layers_in_first_pipeline_stage=1"], "recipe.train"),
        ([f"{ACTOR}tensor_model_parallel_size=2"], "splits each expert by TP: expected expert_tensor_parallel_size 2"),
        ([f"{ACTOR}tensor_model_parallel_size=2", f"{ACTOR}sequence_parallel=false",
          "recipe.train.expert_split=tp_extend_ep"], "loses part of the rotary key's gradient"),
        ([f"{ACTOR}tensor_model_parallel_size=2", f"{ACTOR}expert_model_parallel_size=1",
          "recipe.train.expert_split=tp_extend_ep"], "a multiple of TP 2"),
        ([f"{ACTOR}tensor_model_parallel_size=2", f"{ACTOR}expert_tensor_parallel_size=2",
          "recipe.train.expert_split=tp_extend_ep"], "keeps experts whole"),
        (["recipe.train.swap_optimizer=true", f"{ACTOR}optimizer_offload=true", "recipe.dtype=bf16"],
         "on the host already"),
        (["recipe.train.swap_optimizer=true"], "does not support fp32 weights"),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=true"], "must be full or selective"),
        (FULL, "must be a number of layers, one for each stage, or auto"),
        ([*FULL, f"{LAYERS_KEY}=[1,2]"], "has 2 numbers; expected one for each of 1 pipeline stages"),
        ([f"{OPTIM}total_training_steps=4", f"{OPTIM}lr_warmup_steps=4"], "warm-up"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_its_reason(overrides, message):
    with pytest.raises(ConfigError, match=message):
        _words(_tiny(*overrides))


@pytest.mark.parametrize(("overrides", "added", "removed"), [
    (["recipe.train.gemm_gradient_accumulation_fusion=true"], ["--gemm-gradient-accumulation-fusion"], []),
    (["recipe.train.unpadded_attention=true"], ["--mla-fa-without-pad"], []),
    (["recipe.train.gradient_accumulation_fusion=true"], [], ["--no-gradient-accumulation-fusion"]),
    (["recipe.dtype=bf16"], ["--router-gating-in-fp32"], []),
    (["recipe.train.distributed_timeout_minutes=90"], ["--distributed-timeout-minutes 90"], []),
    (CP, ["--context-parallel-size 2", "--context-parallel-algo ulysses_cp_algo"], ["--variable-seq-lengths"]),
    ([f"{OPTIM}warmup_style=cosine", f"{OPTIM}lr_warmup_steps_ratio=0.1", f"{OPTIM}min_lr_ratio=0.5",
      f"{OPTIM}total_training_steps=50", f"{OPTIM}lr=1e-3"],
     ["--lr-decay-style cosine", "--lr-warmup-iters 5", "--min-lr 0.0005", "--lr-decay-iters 50"], []),
])  # fmt: skip
def test_settings_become_arguments(overrides, added, removed):
    before, words = (" ".join(_words(_tiny(*some))) for some in ([], overrides))
    assert [argument in before for argument in (*added, *removed)] == [False] * len(added) + [True] * len(removed)
    assert [argument in words for argument in (*added, *removed)] == [True] * len(added) + [False] * len(removed)


@pytest.mark.parametrize("number", ["0", "[0]"])
def test_0_recomputed_layers_are_no_recomputation(number):
    assert "recompute" not in " ".join(_words(_tiny(*FULL, f"{LAYERS_KEY}={number}")))
    assert "--recompute-num-layers 1" in " ".join(_words(_tiny(*FULL, f"{LAYERS_KEY}=1")))


def test_explaining_needs_no_torch(run_python):
    run_python("import sys, verl_patches.model.mindspeed.arguments; sys.exit('torch' in sys.modules)").check()


# ---- keys of config.json


def test_transformers_knows_no_further_key():
    """Check that a config.json that transformers wrote is refused for its values only, not for unknown keys."""
    from transformers import DeepseekV3Config, PretrainedConfig

    own = set(DeepseekV3Config().to_dict()) - set(PretrainedConfig().to_dict())
    keys = [*SIZE_ARGUMENTS, *REQUIRED_VALUES, *IGNORED_KEYS, "num_key_value_heads", "rope_scaling"]
    assert own <= set(keys) and len(own) > 30 and len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "HF scoring_func is 'softmax': must be 'sigmoid'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"sliding_window": 4096}, "HF sliding_window is 4096: unknown key"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
    ],
)
def test_another_model_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        command_line_arguments(model_settings({**HF, **change}))
