"""Test patches of vllm-ascend's classes, and both 256-die configurations, on npu_emulated; each group has a process.

Each patch has its control: the same check with upstream's own object in its place.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.runs import composed
from verl_patches.model.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
TREES = ("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM", "vllm-ascend")
MAX_LOGP_ERROR = 1e-5  # |dlogp| in fp32
GRAPHS = {"torchair_graph_config": {"enabled": True, "graph_batch_sizes": [8]}}
WITH_RING, WHOLE_PROMPTS = {"chunked_prefill_for_mla": True}, {"ascend_scheduler_config": {"enabled": True}}
ONE_TOKEN_PROMPTS = [1, 9, 1, 30]  # fresh prompts in one batch, two of them of one token
CASES = [
    {"model": "256 experts", "options": {"max_num_batched_tokens": 64, "additional_config": GRAPHS | WITH_RING},
     "checks": {"ring": {}, "ring, cached": {}}},
    {"model": "256 experts", "options": {"max_num_batched_tokens": 64, "additional_config": GRAPHS}, "checks": {
        "sampled": {"before": "sampled", "tokens": 0},
        "sampled, upstream": {"before": "sampled", "tokens": 0, "without": ["rollout.ascend_top_k_top_p"]},
        "mixed": {},
        "mixed, upstream": {"without": ["rollout.ascend_decode_kv"], "lengths": [6, 18, 4, 141, 65]},
        "ones": {"lengths": ONE_TOKEN_PROMPTS},
        "only ones": {"lengths": [1, 1, 1]},
        "ones, upstream": {"lengths": [length + 1 if length > 1 else 1 for length in ONE_TOKEN_PROMPTS],
                           "without": ["rollout.ascend_decode_kv"]}}},
    {"model": "16 experts", "options": {"max_num_batched_tokens": 512, "enforce_eager": True}, "checks": {
        "groups": {}, "groups, upstream": {"without": ["rollout.ascend_expert_groups"]}}},
    {"model": "64 experts", "options": {"max_num_batched_tokens": 512, "enforce_eager": True}, "checks": {
        "one group": {}, "one group, scaled twice": {"before": "scaled_twice"},
        "one group, not scaled": {"before": "not_scaled"}}},
    *({"model": "256 experts", "options": {"dtype": "bfloat16", "max_num_batched_tokens": 512, "enforce_eager": True},
       "without": rows, "checks": {name: {"before": "routes", "tokens": 12}}}
      for name, rows in (("router", []), ("router, upstream", ["rollout.ascend_fp32_router"]))),
    {"model": "256 experts", "options": {"max_num_batched_tokens": 512,
                                         "additional_config": GRAPHS | WITH_RING | WHOLE_PROMPTS}, "checks": {
        "whole": {"lengths": [5, 140, 270]}, "whole, cached": {"lengths": [5, 140, 270]}}},
    {"model": "16 experts", "options": {"max_num_batched_tokens": 64, "enforce_eager": True,
                                        "additional_config": WHOLE_PROMPTS}, "checks": {
        "dropped": {"before": "dropped", "lengths": [5, 64]}}},
]  # fmt: skip


def router(experts, top_k, factor, groups=1, chosen=1, norm=True):
    """Return a router's keys of config.json."""
    sizes = {"n_routed_experts": experts, "num_experts_per_tok": top_k, "n_group": groups, "topk_group": chosen}
    return sizes | {"routed_scaling_factor": factor, "norm_topk_prob": norm}


MOONLIGHT, KIMI_K2, GROUPS = router(64, 6, 2.446), router(384, 8, 2.827), router(64, 6, 2.5, groups=8, chosen=4)


def build_model(folder, seed=0, **overrides):
    return make_tiny_model(folder, seed, {"num_hidden_layers": 3, **overrides})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, many = tmp_path_factory.mktemp("ascend"), ROOT / "configs/model/deepseekv3_tiny_256experts.json"
    many = json.loads(many.read_text()) | {"num_hidden_layers": 3}
    return {
        "256 experts": str(build_model(folder / "many", **many)),
        "others": str(build_model(folder / "others", seed=1, **many)),
        "16 experts": str(build_model(folder / "few")),
        "64 experts": str(build_model(folder / "one group", **MOONLIGHT)),
    }


@pytest.fixture(scope="module")
def run(run_emulated):
    """Return run(function, *arguments, **environment), the result of "module:function" on one rank."""
    return lambda function, *arguments, **env: run_emulated(function, *arguments, trees=TREES, env=env, backend=None)[0]


@pytest.fixture(scope="module")
def found(models, run):
    served = {name: models[name] for name in ("256 experts", "16 experts", "64 experts")}
    return run("tests.emulation.emulated_engine:main", served, CASES, TORCHDYNAMO_DISABLE="1")


@pytest.mark.parametrize("name", ["ring", "ring, cached", "mixed", "ones", "only ones", "groups", "one group", "whole"])
def test_log_probs_are_those_of_transformers(found, name):
    assert found[name]["worst"] < MAX_LOGP_ERROR and found[name]["same"], found[name]


@pytest.mark.parametrize("name", [
    "mixed, upstream", "groups, upstream", "one group, scaled twice", "one group, not scaled", "whole, cached",
])  # fmt: skip
def test_they_are_not_without_the_row_or_where_the_configuration_is_refused(found, name):
    """Check `whole, cached`: the Ascend scheduler, chunked_prefill_for_mla and a cached prefix (rollout/checks.py)."""
    assert found[name]["worst"] > 0.1 and not found[name]["same"], found[name]


def test_prompts_of_one_token_among_fresh_prompts_have_too_many_slots_upstream(found):
    assert "expected 41 slots, one a row, found 43" in found["ones, upstream"]["refused"]


def test_a_request_that_the_ascend_scheduler_drops_ends_the_run_with_its_name(found):
    """Check also that the engine goes on with prompts that fit, up to the limit."""
    dropped = found["dropped"]
    assert "of 65 tokens; expected at most the 64 tokens of max_num_batched_tokens" in dropped["error"]
    assert dropped["worst"] < MAX_LOGP_ERROR and dropped["same"]


def test_tokens_are_routed_as_in_fp32(found):
    (tokens, other), (_, other_upstream) = (found[name]["routed"] for name in ("router", "router, upstream"))
    assert tokens > 400 and other == 0 and other_upstream > 0.01 * tokens
    assert found["router"]["worst"] < found["router, upstream"]["worst"]


EXPERT_GROUPS = ["rollout.ascend_expert_groups"]
FAULTS = ("the bias is left in the weights", "weights are not scaled", "weights are scaled twice")
ROUTED = {
    "moonlight": {"config": MOONLIGHT},
    "moonlight, upstream": {"config": MOONLIGHT, "without": EXPERT_GROUPS},
    "kimi k2": {"config": KIMI_K2},
    "kimi k2, upstream": {"config": KIMI_K2, "without": EXPERT_GROUPS},
    "not normalised": {"config": router(64, 6, 2.446, norm=False)},
    "groups": {"config": GROUPS},
}
ROUTED_OTHERWISE = {
    "groups, upstream": {"config": GROUPS, "without": EXPERT_GROUPS},
    "a mask of groups": {"config": MOONLIGHT, "wrong": {"n_group": 8, "topk_group": 4}},
    "bf16": {"config": MOONLIGHT, "dtype": "bfloat16"},  # why row rollout.ascend_fp32_router
}


def test_without_256_experts_tokens_are_routed_and_weighted_as_in_transformers(run):
    """Check that the controls have other experts, or other weights."""
    wrong = {fault: {"config": MOONLIGHT, "fault": fault} for fault in FAULTS}
    found = run("tests.rollout.routing_rank:main", ROUTED | ROUTED_OTHERWISE | wrong)
    assert all(found[name][0] == 0 and found[name][1] < 1e-6 for name in ROUTED), found
    assert all(found[name][0] > 0.01 for name in ROUTED_OTHERWISE), found
    assert all(found[fault][0] == 0 and found[fault][1] > 0.1 for fault in FAULTS), found


def test_top_k_and_top_p_leave_the_words_that_they_should(found):
    top_k, top_p, both = found["sampled"]["left"]
    assert top_k == 50 < top_p < 512 and both == 50
    assert found["sampled, upstream"]["left"] == [512, None, None]  # None: an index past the vocabulary


NAMES = ["deepseekv3_256die_true_weight", "deepseekv3_256die_random_init"]
# between the rollouts of both: in two instances a die has twice the experts, and its KV cache holds fewer sequences
DIFFERENT = {"ignore_eos"} | {
    f"engine_kwargs.vllm.{key}"
    for key in ("data_parallel_size", "max_num_seqs", "additional_config.torchair_graph_config.graph_batch_sizes")
}


def read_as(run, sizes=(8, 16, 32, 64)):
    """Return the values of recipe.rollout.ascend that the engine must hold, with graphs of `sizes` by default."""
    expected = asdict(run.recipe.rollout.ascend)
    return expected | {"graph_batch_sizes": expected["graph_batch_sizes"] or [*sizes]}


def test_both_256_die_configurations_have_one_rollout_but_for_sizes():
    def flat(section, prefix=""):
        for key, value in section.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]

    first, second = (dict(flat(OmegaConf.to_container(composed(n).verl.actor_rollout_ref.rollout))) for n in NAMES)
    assert {key for key in first | second if first.get(key) != second.get(key)} == DIFFERENT


@pytest.mark.parametrize("level", ["reference", "tuned"])
def test_the_256_die_rollout_with_true_weights_is_right(models, run, level):
    """Check each of the traced graphs, and again after each of two syncs by the map of the direct weight sync."""
    options = composed(NAMES[0], [f"level={level}"])
    found = run(
        "tests.rollout.die256:true_weight",
        models["256 experts"],
        models["others"],
        [f"level={level}"],
        TORCHDYNAMO_DISABLE="0",
    )
    assert len(found["worst"]) == 4 and max(found["worst"]) < MAX_LOGP_ERROR, found
    sizes = [48] if level == "reference" else [8, 16, 32, 64]
    assert found["graphs"] == sizes
    assert found["responses"] == [16] * (sizes[-1] // 16) and 32 < found["decodes"] <= sizes[-1]
    assert found["mixed"] > 5 if level == "tuned" else found["mixed"] == 0
    assert found["moved"] == []
    assert found["read"] == read_as(options, sizes)
    written = dict(options.ascend)
    assert written.pop("enable_prefix_caching") == (level == "tuned")  # read before the engine
    assert found["options"] == written


# each switch of recipe.rollout.ascend alone, and what it needs; then rows
SWITCHES = {
    "top_k_optimize": {"keys": ["top_k_optimize=false"]},
    "none": {},
    "graphs": {"keys": ["graphs=false", "multistream_mla=false", "multistream_moe=false"]},
    "scheduler": {"keys": ["scheduler=ascend", "prefix_caching=false"],
                  "more": ["actor_rollout_ref.rollout.max_num_batched_tokens=4096"]},
    **{key.partition("=")[0]: {"keys": [key]} for key in (
        "graph_batch_sizes=[64]", "multistream_mla=false", "multistream_moe=false", "view_optimize=true",
        "chunked_prefill_for_mla=false", "prefix_caching=false")},
    "fp32 router": {"without": ["rollout.ascend_fp32_router"]},
}  # fmt: skip


def difference(first, second):
    """Return (whether all tokens are equal, largest difference of their log-probs) of two lists of answers."""
    pairs = list(zip(first, second, strict=True))
    same = all(one[0] == other[0] for one, other in pairs)
    return same, max(abs(a - b) for one, other in pairs for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.nightly
def test_each_switch_off_alone_gives_the_same_responses(models, run):
    """Sample with seeds, after sleep and with cached prompts too, in fp32; graphs are not traced."""
    found = run("tests.rollout.die256:switches", models["256 experts"], SWITCHES, TORCHDYNAMO_DISABLE="1")
    for name, line in SWITCHES.items():
        changed = [f"recipe.rollout.ascend.{key}" for key in line.get("keys", [])]
        expected = read_as(composed(NAMES[0], ["level=tuned", *changed]))
        if name == "graphs":  # then they are not read
            expected["graph_batch_sizes"] = found["read"][name]["graph_batch_sizes"]
        assert found["read"][name] == expected, name
    differences = {name: difference(found["none"], found[name]) for name in SWITCHES}
    assert {name: each for name, each in differences.items() if not each[0] or each[1] > MAX_LOGP_ERROR} == {}
    same, largest = difference(found["none"], found["balanced routing"])  # the control
    assert not same and largest > 0.01
