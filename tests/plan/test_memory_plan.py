"""Test the plan's memory section: the 256-die runs against a die, and the tiny run's bytes."""

import re
from dataclasses import replace

import psutil
import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.runs import composed
from verl_patches.catalog import platform_rows
from verl_patches.errors import ConfigError
from verl_patches.plan import activations
from verl_patches.plan import memory_plan as memory_plan_module
from verl_patches.plan.memory_plan import (
    CHECKPOINTING_KEY,
    LAYERS_KEY,
    MARGIN_BYTES,
    followed_peaks,
    host_limit,
    kv_cache_plan,
    memory_plan,
    memory_shortages,
    recomputation,
    recompute_keys,
    run_memory,
    with_recompute,
)
from verl_patches.plan.step_plan import Workload, mean_tokens
from verl_patches.platform.npu.machine import HARDWARE
from verl_patches.run.compose import compose
from verl_patches.run.resolve import CONFIGS_DIR, changed_run

pytestmark = pytest.mark.slow

A3_SEEN_BYTES = HARDWARE["a3"].seen_bytes
BIG, TINY = "deepseekv3_256die_random_init", "deepseekv3_tiny_cpu"
DIRECT_ROWS = ("reshard.direct", "memory.order")
ACTOR = "actor_rollout_ref.actor."


@pytest.fixture(scope="module")
def big():
    """Return the random-init configuration with a pass for old log-probs."""
    return make_run(BIG)


def undecided(name, *overrides, skip=False):
    """Return a run as it is composed, with the word `auto` where the configuration has it."""
    level = [] if name == TINY else ["level=tuned"]
    return compose(name, [*level, f"recipe.train.skip_old_log_prob={str(skip).lower()}", *overrides], platform_rows)


def make_run(name, *overrides, rows=None, skip=False):
    """Return a run with its own rows on, or with these."""
    run = undecided(name, *overrides, skip=skip)
    return with_recompute(run if rows is None else replace(run, rows=frozenset(rows)))


def plan(name, *overrides, rows=DIRECT_ROWS, skip=False):
    return planned(make_run(name, *overrides, rows=rows, skip=skip))


def planned(run):
    return memory_plan(run, run_memory(run))


def test_the_256_die_run_fits_in_the_order_that_it_follows_and_not_in_verls():
    ours, verls = plan(BIG), plan(BIG, rows=())
    assert ours["order"] == "ours, with vLLM's sleep mode" and ours["modelled"] and ours["swapped"]
    assert ours["peak_bytes"] <= ours["hbm_bytes"] == A3_SEEN_BYTES < verls["peak_bytes"]


def test_the_order_and_its_buffers_depend_on_the_rows_that_are_on():
    assert plan(BIG, rows=())["order"] == "verl 54c9b736"
    gathered, direct = (plan(BIG, rows=rows)["phases"][0]["bytes"] for rows in (("memory.order",), DIRECT_ROWS))
    assert gathered["reshard_buffers"] != direct["reshard_buffers"]
    assert plan(BIG, rows=(*DIRECT_ROWS, "memory.sleep_mode"))["order"] == "ours"


def test_a_die_has_one_reward_model_at_a_time_and_a_node_a_host_copy_of_each():
    entries = "{name: reward_model, path: a},{name: reward_model, path: b}"
    one, two = (plan(BIG, f"recipe.rewards=[{text}]") for text in (entries[: len(entries) // 2], entries))
    for found in (one, two):
        assert found["order"].endswith("with reward models")
    (one_phases, two_phases) = (found["phases"] for found in (one, two))
    assert one_phases == two_phases
    (scoring,) = (phase["bytes"] for phase in one_phases if phase["phase"] == "rm_scores")
    assert scoring["reward_params"] > 0 < scoring["working_activations"]
    host = [found["host"]["bytes"]["reward_params"] for found in (one, two)]
    loaded = [found["to_device_bytes"]["max"] for found in (one, two)]
    assert host[1] == 2 * host[0] > 0 and loaded[1] - loaded[0] == scoring["reward_params"]


def group_size(group, *overrides, **options):
    """Return {phase: bytes of a memory group} in our order."""
    return {p["phase"]: p["bytes"].get(group) for p in plan(BIG, *overrides, **options)["phases"]}


@pytest.mark.parametrize(
    ("override", "group"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.7", "kv_cache"),
        ("recipe.reshard.bucket_bytes=268435456", "reshard_buffers"),
        ("recipe.train.swap_optimizer=false", "optimizer"),
        ("recipe.tensor_cache.enabled=false", "tensor_cache"),
        (f"{ACTOR}megatron.param_offload=false", "grads"),  # gradients stay with the parameters
    ],
)
def test_keys_of_the_configuration_reach_the_bytes(override, group):
    assert group_size(group, override) != group_size(group)


def test_most_bytes_of_the_tensor_cache():
    """Use 512 prompts of 16 samples over 8 replicas: ids of 1024 + 3072, log-probs of 3072 two or three times."""

    def cached(*overrides, skip=True):
        return group_size("tensor_cache", "recipe.tensor_cache.enabled=true", *overrides, skip=skip)

    assert cached()["ref"] == 512 * 16 // 8 * 4 * (1024 + 3072 * 3) and "old_log_prob" not in cached()
    assert cached(skip=False)["ref"] == 512 * 16 // 8 * 4 * (1024 + 3072 * 4)
    short = cached("data.max_response_length=1024", "actor_rollout_ref.actor.use_kl_loss=false")
    assert short["ref"] == 1024 * 4 * 1024 * 3


def test_a_cpu_has_no_die_to_compare_with():
    planned = plan(TINY)
    assert planned["hbm_bytes"] is None and planned["order"] == "ours, with vLLM's sleep mode"


def test_the_host_memory_of_the_runbook_and_the_presets_is_the_plans():
    text = (ROOT / "docs" / "256-die-runbook.md").read_text().partition("\n## Host memory\n")[2]
    rows = re.findall(r"^\| `(.+)` \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    for words, nodes, pinned, needed in rows:
        run = make_run(*words.split(), skip=True)
        host = planned(run)["host"]
        assert run.verl.trainer.nnodes == int(nodes), words
        assert [f"{host[name] / 2**30:.0f}" for name in ("pinned_bytes", "node_bytes")] == [pinned, needed], words
    assert len(rows) > 5
    presets = 0
    for file in (ROOT / "configs").glob("*die.yaml"):  # the first lines of those that need more than the 256-die run
        head, _, _ = file.read_text().replace("\n# ", " ").partition("\n")
        for override, gib in re.findall(r"(recipe\.num_hidden_layers=\d+)? ?pins? (\d+)", head):
            host = planned(make_run(file.stem, *filter(None, [override]), skip=True))["host"]
            assert f"{host['pinned_bytes'] / 2**30:.0f}" == gib, (file.name, override)
            presets += 1
    assert presets == 10


def test_what_is_beside_the_memory_groups():
    """Check HCCL's memory, and 771.5 GB a node as in the runbook.

    Training has 6 groups, 2 of them large, the rollout 6 with 3 large ones, each with two buffers of 300 or 64 MiB."""
    planned = plan(BIG, f"{LAYERS_KEY}=8", rows=None, skip=True)
    phases = {phase["phase"]: phase["bytes"] for phase in planned["phases"]}
    rollout, update = phases["rollout"], phases["update"]
    for phase in (rollout, update):
        assert phase["hccl_buffers"] == 2 * (5 * 300 + 7 * 64) << 20 and phase["cann_context"] == 1 << 30
    assert "engine_activations" in rollout and "engine_activations" not in update
    work = {"kept_activations", "working_activations"}
    assert work <= update.keys() and "logits" in phases["ref"] and "weight_gradient" not in update
    assert not work & (phases["reshard"].keys() | rollout.keys() | phases["reward"].keys())
    apart = group_size("weight_gradient", "recipe.train.gemm_gradient_accumulation_fusion=false", rows=None)["update"]
    assert apart == 2 * 8 * 7168 * 2 * 2048  # 8 experts of a die in bf16
    host = planned["host"]
    assert round(host["pinned_bytes"] / 1e9, 1) == 771.5 and host["limit_bytes"] is None
    # a process of each die, the store
    assert host["node_bytes"] == host["pinned_bytes"] + 16 * (10 << 30) + 200 * 10**9
    assert set(planned["host"]["bytes"]) == {"actor_params", "ref_params", "optimizer"}
    groups = {(each["group"], each["ranks"], each["buffer_mib"]) for each in planned["communicators"]}
    assert {("vllm_dp", 128, 64), ("vllm_ep", 256, 64), ("vllm_mc2", 256, 300)} <= groups
    stays = plan(BIG, f"{ACTOR}megatron.param_offload=false", "trainer.save_freq=1")["host"]["bytes"]
    assert stays["checkpoint"] == planned["host"]["bytes"]["actor_params"] and "actor_params" not in stays


def kv_cache(name, *overrides):
    run = make_run(name, *overrides)
    return kv_cache_plan(run, run_memory(run), mean_tokens(run, Workload()))


def test_the_kv_cache_is_what_vllm_ascends_worker_leaves_it():
    """Compute determine_available_memory by hand: the share less weights, HCCL, CANN, and a batch of 1024 tokens."""
    phases = {each["phase"]: each["bytes"] for each in planned(make_run(BIG, skip=True))["phases"]}
    rollout, update = phases["rollout"], phases["update"]
    rows, (hidden, inner) = 512 * 8, (7168, 2048)  # of a TP rank: half of the tokens, each at 8 experts
    assert 2 * rows * (2 * hidden + 3 * inner) < rollout["engine_activations"] < 2**30
    beside = rollout["hccl_buffers"] + rollout["cann_context"] + rollout["engine_activations"]
    assert rollout["kv_cache"] == int(0.8 * A3_SEEN_BYTES) - rollout["rollout_weights"] - beside
    # one graph, of 64 tokens: MC2 has room for 32 of each of 256 ranks at a rank's one expert; logits in bf16 and fp32
    graph = 2 * 256 * 32 * (2 * hidden + 3 * inner) + 6 * 64 * 129280 // 2
    assert rollout["graphs"] == update["graphs"] == graph
    eager = planned(composed("moonlight_8die"))["phases"]
    assert all("graphs" not in each["bytes"] for each in eager)  # control: without graphs


def test_preemption_is_impossible_where_the_cache_holds_every_sequence_at_full_length():
    seqs, true = "actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs", "deepseekv3_256die_true_weight"
    graphs = "recipe.rollout.ascend.graph_batch_sizes=[8]"
    found = kv_cache(true, graphs)
    assert kv_cache(BIG)["preemption"] == "impossible" and found["preemption"] == "possible"
    token_bytes = 61 * (512 + 64) * 2
    assert found["held_tokens"] == (found["die_bytes"] // (128 * token_bytes) - 1) * 128
    assert (found["sequences"], found["needed_tokens"]) == (64, 64 * 4096)
    safe = found["safe_sequences"]
    assert safe * 4096 <= found["held_tokens"] < (safe + 1) * 4096
    for sequences, preemption in ((safe, "impossible"), (safe + 1, "possible")):
        assert kv_cache(true, graphs, f"{seqs}={sequences}")["preemption"] == preemption
    assert kv_cache(true, f"{seqs}=512")["preemption"] == "likely" and kv_cache(TINY) is None


@pytest.mark.parametrize(
    ("name", "layers"),
    [("deepseekv3_16die", 6), ("deepseekv3_64die", 16), ("deepseekv3_128die", 30), ("kimi_k2_192die", 24)],
)
def test_a_preset_that_pins_more_than_the_256_die_run_says_so_and_names_what_does_not(name, layers):
    def pinned_gib(*names):
        return round(planned(composed(*names))["host"]["pinned_bytes"] / 2**30)

    override = f"recipe.num_hidden_layers={layers}"
    more, less, most = pinned_gib(name), pinned_gib(name, [override]), pinned_gib(BIG)
    assert more > most > less
    first = " ".join(line.strip("# ") for line in (CONFIGS_DIR / f"{name}.yaml").read_text().splitlines()[:2])
    assert f"pin {more} GiB" in first and f"the {most} of" in first and f"{override} pins {less}" in first


ROOM_BYTES = A3_SEEN_BYTES - MARGIN_BYTES


def update_peak(run):
    (update,) = (phase for phase in followed_peaks(run)["phases"] if phase["phase"] == "update")
    return update["peak_bytes"]


@pytest.mark.parametrize("name", [BIG, "deepseekv3_256die_true_weight"])
def test_auto_recomputes_the_fewest_layers_of_each_stage_that_leave_the_margin(name):
    run = compose(name, ["level=tuned"], platform_rows)
    assert OmegaConf.select(run.verl, LAYERS_KEY) == "auto"
    chosen = with_recompute(run)
    layers, together = recomputation(chosen)
    assert len(layers) == 8 and together == 1 and layers[-1] == 0 < max(layers) < 8
    critics = OmegaConf.select(chosen.verl, LAYERS_KEY.replace("actor_rollout_ref", "critic"))
    assert OmegaConf.select(chosen.verl, LAYERS_KEY) == critics
    assert update_peak(chosen) <= ROOM_BYTES
    for stage, number in enumerate(layers):  # control: one layer less of any stage does not leave it
        if number:
            less = [*layers[:stage], number - 1, *layers[stage + 1 :]]
            assert update_peak(changed_run(chosen, recompute_keys(less))) > ROOM_BYTES


def test_a_fixed_number_stays_and_0_is_none():
    eight, none = (make_run(BIG, f"{LAYERS_KEY}={number}", skip=True) for number in (8, 0))
    assert with_recompute(none) is none and recomputation(none) == (0, 1) and recomputation(eight) == (8, 1)
    assert update_peak(none) > A3_SEEN_BYTES > ROOM_BYTES > update_peak(eight)
    assert update_peak(none) == update_peak(changed_run(none, {CHECKPOINTING_KEY: False}))
    off = make_run(BIG, f"{CHECKPOINTING_KEY}=false")
    assert recomputation(off) == (0, 1) and update_peak(off) == update_peak(none)
    uniform = changed_run(eight, {LAYERS_KEY: 2, LAYERS_KEY.replace("num_layers", "method"): "uniform"})
    assert recomputation(uniform) == (61, 2)


def test_the_public_script_without_recomputation_fits_at_its_own_lengths_only(monkeypatch):
    """Plan its run of 75 + 3040 tokens a sample; its layout BNSD pads values to 192 (docs/plan.md, Recompute)."""
    own = ("data.max_prompt_length=75", "data.max_response_length=3040", f"{LAYERS_KEY}=0")
    whole, short = (update_peak(make_run(BIG, *overrides, skip=True)) for overrides in (own[2:], own))
    monkeypatch.setattr(activations, "_FLASH_WIDTH", 1)
    narrow = update_peak(make_run(BIG, *own, skip=True))
    assert [round(size / 1e9, 1) for size in (whole, short, narrow)] == [72.0, 61.7, 59.3]
    assert narrow < short < A3_SEEN_BYTES < whole


def test_auto_with_a_critic_leaves_the_margin_in_both_updates():
    chosen = make_run(BIG, "algorithm.adv_estimator=gae", "critic.model.path=a")
    peaks = {phase["phase"]: phase["peak_bytes"] for phase in followed_peaks(chosen)["phases"]}
    assert max(peaks["update"], peaks["update_critic"]) <= ROOM_BYTES
    assert sum(recomputation(chosen)[0]) >= sum(recomputation(make_run(BIG))[0])


def test_auto_is_refused_where_activations_are_not_counted_and_a_tiny_model_needs_none():
    auto = f"++{LAYERS_KEY}=auto"
    with pytest.raises(ConfigError, match="num_layers is auto; expected a number: .* line a3 only"):
        make_run(TINY, auto, f"{CHECKPOINTING_KEY}=true")
    key = LAYERS_KEY.replace("num_layers", "method")
    with pytest.raises(ConfigError, match=f"{key} is uniform; expected .* with {LAYERS_KEY}=auto"):
        make_run(BIG, f"{key}=uniform")
    assert recomputation(make_run(TINY, auto, f"{CHECKPOINTING_KEY}=true", "recipe.line=a3")) == (0, 1)


def test_a_die_that_is_short_is_named_with_its_largest_terms(big):
    run = changed_run(big, {"recipe.reshard.bucket_bytes": 1 << 34})
    (said,) = memory_shortages(followed_peaks(run)["phases"], A3_SEEN_BYTES)
    assert said.startswith("reshard: die ") and "GB of 65.79; largest: reshard_buffers 68.72" in said
    assert memory_shortages(followed_peaks(big)["phases"], A3_SEEN_BYTES) == []


def test_logits_that_do_not_fit_name_the_key_of_their_micro_batch():
    """Count 163,840 words in bf16 and fp32 for 16 sequences of 4096 tokens; the control: the preset has 2."""
    key = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    (said,) = memory_shortages(followed_peaks(composed("moonlight_16die", [f"{key}=16"]))["phases"], A3_SEEN_BYTES)
    logits = 16 * 4096 * (6 * 163_840 + 2 * 2048) / 1e9  # and the input of the head
    assert f"largest: logits {logits + 0.02:.2f}, " in said and said.endswith(f"; lower {key}")
    assert memory_shortages(followed_peaks(composed("moonlight_16die"))["phases"], A3_SEEN_BYTES) == []


def test_host_memory_is_compared_with_the_key_and_with_a_machine_that_has_dies(big, monkeypatch, tmp_path):
    run = changed_run(big, {"recipe.memory.host_gib": 512})
    assert host_limit(run) == 512 << 30
    found = planned(run)
    assert found["host"]["node_bytes"] > found["host"]["limit_bytes"] == 512 << 30
    monkeypatch.setattr(memory_plan_module, "DEVICE_FOLDER", tmp_path)
    assert host_limit(big) is None
    (tmp_path / "davinci0").touch()
    assert host_limit(big) == psutil.virtual_memory().total and host_limit(make_run(TINY)) is None
