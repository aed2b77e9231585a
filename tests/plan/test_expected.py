"""Test bytes of each memory group and peaks of each phase, for the 256-die run and for any small layout."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout, rollout_layout
from verl_patches.memory.schedule import CRITIC, SCHEDULE, VERL_SCHEDULES
from verl_patches.plan.activations import Passes
from verl_patches.plan.expected import Setting, group_bytes, host_bytes, memory_peaks, record_bytes, work_bytes

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG = build_inventory(MODELS / "deepseekv3_671b.json")
TINY = build_inventory(MODELS / "deepseekv3_tiny.json")
IN_FP32 = build_inventory(replace(TINY.model, torch_dtype="float32"))
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
ROLLOUT = rollout_layout(1, 128, 2)
HBM = 64 << 30
SHARE = int(0.8 * HBM)
DIE256 = Setting(BIG, TRAIN, ROLLOUT, vllm_bytes=SHARE)
SWAPPED = replace(DIE256, swap_pieces=16)
CRITICS = set(CRITIC)


def gb(size):
    return round(size / 1e9, 2)


def test_a_critic_is_a_second_trained_model_with_another_head():
    last = DIE256.train.world_size - 1
    for rank, head in ((0, 0), (last, 129280 // 4 * 7168 - (7168 + 1))):
        alone, found = (group_bytes(replace(DIE256, critic=critic), rank) for critic in (False, True))
        assert {group: size for group, size in found.items() if group not in CRITICS} == alone
        assert found["actor_params"] - found["critic_params"] == 2 * head
        assert found["grads"] - found["critic_grads"] == 4 * head
    found = memory_peaks(SCHEDULE.with_critic(), replace(SWAPPED, critic=True))
    held = {phase["phase"]: phase["bytes"].keys() for phase in found["phases"]}
    assert held["values"] == {"critic_params"} and "actor_params" not in held["update_critic"]
    sizes = group_bytes(replace(DIE256, critic=True), 0)
    pinned = host_bytes(sizes, SCHEDULE.with_critic(), (), swapped=False, saves=False)
    assert CRITICS & pinned.keys() == {"critic_params", "critic_optimizer"}


def test_rollout_weights_and_the_caches_share():
    """Check 25.81 GB a die, the published figure for EP256, shared experts whole as in vllm-ascend's graph mode."""
    found = group_bytes(replace(DIE256, rollout_library="vllm-ascend"), 0)
    assert gb(found["rollout_weights"]) == 25.81
    assert found["rollout_weights"] + found["kv_cache"] == SHARE
    assert group_bytes(replace(DIE256, vllm_bytes=0), 0)["kv_cache"] == 0


def test_absorbed_projections_that_the_engine_copies():
    """Check the size, kv_b_proj's: 61 layers of 128 heads of 128 + 128 by 512 in bf16, half of it on a die at TP 2."""
    views, copies = (group_bytes(replace(DIE256, absorbed_copies=more), 0) for more in (False, True))
    assert copies["rollout_weights"] - views["rollout_weights"] == 61 * 128 * 256 * 512 * 2 // 2
    assert copies["rollout_weights"] + copies["kv_cache"] == SHARE
    assert copies["reshard_buffers"] == views["reshard_buffers"]  # the copies are computed on the rank, not sent


def test_peaks_of_the_256_die_run_in_our_schedule():
    found = memory_peaks(SCHEDULE, SWAPPED)
    phases = {p["phase"]: gb(p["peak_bytes"]) for p in found["phases"]}
    assert phases["update"] == round(20.32 + gb(8 * 2 * 2048 * 7168 * 12), 2)  # published, plus one layer's experts
    assert phases["old_log_prob"] == 6.77 and phases["ref"] == 13.55 and phases["rollout"] == gb(0.8 * HBM)
    assert found["peak_bytes"] < HBM and found["empty_cache_calls"] == 2
    moved = found["to_device_bytes"]["mean"] + found["to_host_bytes"]["mean"]
    assert round(moved / 1e9, 1) == 19.1  # published as the least that a step moves: actor in and out, reference in
    assert gb(memory_peaks(SCHEDULE, DIE256)["peak_bytes"]) == 54.99  # published, not swapped


def test_peaks_of_the_256_die_run_in_verls_schedules():
    """Model verl 54c9b736, which wakes the KV cache beside training weights and gradients: more than a die has."""
    old, new = (memory_peaks(VERL_SCHEDULES[line], replace(SWAPPED, bucket_bytes=None)) for line in ("a3", "pypi"))
    (wake,) = (p for p in old["phases"] if p["phase"] == "wake_kv")
    assert old["peak_bytes"] == wake["peak_bytes"] > HBM > new["peak_bytes"]
    assert wake["peak_bytes"] == sum(wake["bytes"].values())
    assert set(wake["bytes"]) == {"actor_params", "grads", "rollout_weights", "kv_cache"}
    ours = memory_peaks(SCHEDULE, SWAPPED)
    for verl in (old, new):
        by_phase = {p["phase"]: p["peak_bytes"] for p in verl["phases"]}
        assert by_phase["reshard"] > 1.4 * ours["phases"][0]["peak_bytes"]
        moved = [sum(of[key]["mean"] for key in ("to_device_bytes", "to_host_bytes")) for of in (verl, ours)]
        assert moved[0] > 5 * moved[1]


@st.composite
def layouts(draw):
    """Draw training layouts of the tiny model (4 layers, 16 experts, 4 heads) and rollouts over the same ranks."""
    tp, pp, ep = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2, 4], [1, 2, 4, 8]))
    world = max(tp, ep) * pp * draw(st.sampled_from([1, 2]))
    train = ParallelLayout(world, tp=tp, pp=pp, ep=ep, etp=1)
    rtp = draw(st.sampled_from([n for n in (1, 2, 4) if world % n == 0]))
    dp = draw(st.sampled_from([n for n in (1, 2, 4) if (world // rtp) % n == 0 and n * rtp <= 16]))
    return train, rollout_layout(world // rtp // dp, dp, rtp, expert_parallel=dp * rtp > 1)


@settings(max_examples=60, deadline=None)
@given(pair=layouts(), swap=st.sampled_from([None, 1, 4]), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_any_layout_has_the_whole_model_and_ours_peaks_no_higher(pair, swap, dtype):
    train, _ = pair
    model = IN_FP32 if dtype == "float32" else TINY
    setting = Setting(model, *pair, "megatron-local", swap_pieces=swap, vllm_bytes=1 << 28, bucket_bytes=1 << 16)
    ranks = range(train.world_size)
    every = [group_bytes(setting, rank) for rank in ranks]
    trainable = sum(p.count for p in model.parameters if p.trainable)
    once = [r for r in ranks if train.coordinates(r).dp == 0]
    if train.tp == 1 and train.ep == 1:
        assert sum(every[r]["grads"] for r in once) == 4 * trainable
    size = 2 if dtype == "bfloat16" else 4
    for sizes in every:
        assert sizes["actor_params"] * 4 == sizes["grads"] * size
        assert (sizes["optimizer"] == 0) == (swap is not None) == (sizes["swap_window"] > 0)
    found = {}
    for name, schedule in {"ours": SCHEDULE, **VERL_SCHEDULES}.items():
        found[name] = memory_peaks(schedule, setting)
        for phase in found[name]["phases"]:
            assert phase["peak_bytes"] == sum(phase["bytes"].values())
            assert all(every[phase["rank"]][t] == size for t, size in phase["bytes"].items())
    fullest = max(found["ours"]["phases"], key=lambda p: p["peak_bytes"])["phase"]  # in ref the actor stays beside it
    assert fullest == "ref" or all(found["ours"]["peak_bytes"] <= each["peak_bytes"] for each in found.values())


def test_the_worst_rank_is_worst_over_all_ranks():
    """Check all ranks, as a negative control for looking at one rank of each kind only."""
    train = ParallelLayout(8, tp=2, pp=2, ep=4, etp=1)
    setting = Setting(IN_FP32, train, rollout_layout(2, 2, 2), "megatron-local")
    found = memory_peaks(SCHEDULE, setting)
    update = next(p for p in found["phases"] if p["phase"] == "update")
    every = [group_bytes(setting, rank) for rank in range(8)]
    sums = [s["actor_params"] + s["grads"] + s["optimizer"] for s in every]
    assert update["peak_bytes"] == max(sums) and min(sums) < max(sums) and update["rank"] == sums.index(max(sums))


def test_ranks_must_be_the_same():
    with pytest.raises(ConfigError, match="training has 256 ranks, rollout 2"):
        memory_peaks(SCHEDULE, replace(DIE256, rollout=rollout_layout(2, 1, 1)))


SIZES = {"actor_params": 2, "grads": 4, "optimizer": 12, "ref_params": 3, "rollout_weights": 5, "swap_window": 1}


def test_the_record_of_routed_experts_by_stage_and_phase():
    """Use 1,024 samples of 4,096 tokens; the first stage has three dense layers. Control: nothing without a record."""
    model, tokens = BIG.model, 1024 * 4096
    assert [record_bytes(model, TRAIN, stage, tokens) for stage in (0, 2)] == [tokens * 32, tokens * 64]
    wide = replace(model, n_routed_experts=512)
    assert record_bytes(wide, TRAIN, 2, tokens) == tokens * 128
    passes = Passes(4096, 4096, 4096, micro_batches=64, recorded_tokens=tokens)
    setting = replace(DIE256, passes=passes)
    last = [work_bytes(setting, 255, phase) for phase in ("old_log_prob", "ref", "update", "rollout")]
    assert [terms.get("routing_record") for terms in last] == [112 * tokens, 56 * tokens, 56 * tokens, None]
    without = work_bytes(replace(DIE256, passes=replace(passes, recorded_tokens=0)), 255, "update")
    assert without["routing_record"] == 0


@pytest.mark.parametrize(
    ("schedule", "stays", "options", "expected"),
    [
        (SCHEDULE, {"optimizer"}, {"swapped": True}, {"actor_params": 2, "ref_params": 3, "optimizer": 12}),
        (SCHEDULE, {"optimizer"}, {"saves": True}, {"actor_params": 2, "ref_params": 3, "checkpoint": 12}),
        (SCHEDULE, {"actor_params", "grads", "ref_params"}, {"saves": True}, {"optimizer": 12, "checkpoint": 2}),
        (VERL_SCHEDULES["a3"], set(), {}, {"actor_params": 2, "ref_params": 3, "optimizer": 12, "rollout_weights": 5}),
    ],
)
def test_what_is_loaded_has_a_copy_on_the_host(schedule, stays, options, expected):
    assert host_bytes(SIZES, schedule, stays, **{"swapped": False, "saves": False, **options}) == expected
