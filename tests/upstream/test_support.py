import ast
import re
from pathlib import Path

import pytest

from tests.runs import composed
from tests.symbols import symbol_source
from verl_patches.errors import ConfigError
from verl_patches.plan.memory_plan import LAYERS_KEY
from verl_patches.recipe import recipe_keys
from verl_patches.run.compose import compose_config
from verl_patches.upstream.checkouts import verl_config_dir
from verl_patches.upstream.pins import load_pins
from verl_patches.upstream.support import refused_keys, support_checks

TINY, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REFUSED_VALUES = {  # values that are not neutral, for keys of every kind
    f"{ACTOR}.megatron.context_parallel_size": "2",
    f"{ACTOR}.checkpoint.contents": "[model]",
    f"{ROLLOUT}.mode": "async",
    f"{ROLLOUT}.multi_turn.enable": "true",
    f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config": "{model: x}",
    f"+{ROLLOUT}.prompt_logprobs": "0",
    "+actor_rollout_ref.model.lora_rank": "8",
    "+reward_model.overlong_buffer": "{enable: true, len: 8}",
    "trainer.del_local_ckpt_after_load": "true",
    "recipe.train.layers_per_stage": "[1]",
    "recipe.train.use_fused_rotary_pos_emb": "false",
    "recipe.train.adam_beta1": "0.8",
    "recipe.train.adam_eps": "1e-6",
}


def refused_details(overrides):
    """Return details of the keys that the line of the tiny run does not support."""
    return [check.detail for check in support_checks(composed(TINY, overrides)) if not check.ok]


@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_a_key_of_the_pin_file_is_refused_by_name(line):
    pins, given = load_pins(), [f"recipe.line={line}"]
    assert {key.lstrip("+") for key in REFUSED_VALUES} <= {entry.key for entry in pins.unsupported}
    for key, value in REFUSED_VALUES.items():
        if key[0] != "+" or pins.may_be_added(key[1:], line):
            given.append(f"{key}={value}")
            continue
        with pytest.raises(ConfigError, match=re.escape(key[1:])):
            compose_config(TINY, [f"recipe.line={line}", f"{key}={value}"])
    keys = {override.lstrip("+").partition("=")[0] for override in given}
    entries = [entry for entry in pins.unsupported_on(line) if entry.key in keys]
    assert [entry.key for entry, _ in refused_keys(composed(TINY, given))] == [entry.key for entry in entries]
    assert [detail.partition(" is ")[0] for detail in refused_details(given)] == [entry.key for entry in entries]


def test_a_neutral_config_and_keys_that_only_vllm_reads_are_not_refused():
    for_vllm = [f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32", f"+{ROLLOUT}.engine_kwargs.vllm.load_format=null"]
    assert refused_details(for_vllm) == refused_details(["recipe.line=a3"]) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"+{ROLLOUT}.engine_kwargs.vllm.enable_prefix_caching=false", "recipe.rollout.ascend or"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.enforce_eager=true", "verl already passes this keyword"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seq=8", "did you mean max_num_seqs"),
    ],
)
@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_a_rollout_key_that_would_not_act_is_refused(line, override, words):
    (fault,) = refused_details([f"recipe.line={line}", override])
    assert words in fault and fault.startswith(override.lstrip("+").partition("=")[0])


@pytest.mark.parametrize("line", ["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def test_the_keywords_that_verl_passes_to_vllm_are_those_of_the_pin_file(line, pytestconfig):
    verl = Path(pytestconfig.getoption("--upstream")).absolute() / "verl" if line == "a3" else None
    package, pins = verl_config_dir(verl).parents[1], load_pins()
    (given,) = {entry.why for entry in pins.unsupported if "verl already passes" in entry.why}
    listed = {entry.key.rpartition(".")[2] for entry in pins.unsupported if entry.why == given}
    place = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd.vLLMRollout.__init__"
    nodes = ast.walk(ast.parse(symbol_source(place, package.parent)))
    call = next(node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLM")
    assert {word.arg for word in call.keywords if word.arg} == listed


def test_layers_of_each_stage_are_refused_on_line_pypi_alone():
    neutral = ["swap_optimizer=false", "moe_alltoall_overlap_comm=false", "gemm_gradient_accumulation_fusion=false"]
    neutral += ["distributed_timeout_minutes=30", "adam_beta2=0.999"]
    run = composed(LARGE, ["recipe.line=pypi", f"{LAYERS_KEY}=4", *(f"recipe.train.{key}" for key in neutral)])
    (check,) = support_checks(run)
    assert not check.ok and "recipe.train.layers_per_stage is [7, 7, 8, 8, 8, 8, 8, 7]" in check.detail
    there = composed(LARGE, [f"{LAYERS_KEY}=4"])
    assert there.line == "a3" and refused_keys(there) == []


def test_every_key_of_recipe_train_is_refused_or_read_on_line_pypi():
    """Check layers_per_stage too; expert_split is a layout's, balanced_routing is refused by its value.

    skip_old_log_prob, routing replay, skipped steps and importance_ratio are for both lines.
    """
    refused = {entry.key for entry in load_pins().unsupported_on("pypi")}
    keys = {key for key, _ in recipe_keys() if key.startswith("recipe.train.")}
    read = {"expert_split", "balanced_routing", "skip_old_log_prob"}
    read |= {"routing_replay", "max_skipped_steps", "importance_ratio"}
    assert keys - refused == {f"recipe.train.{name}" for name in read}
