"""What is there throughout a phase, and host copies."""

from dataclasses import replace

import pytest

from verl_patches.config.compose import CONFIGS_DIR
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.memory.schedule import SCHEDULE, VERL, in_sleep_mode
from verl_patches.planning.activations import Passes
from verl_patches.planning.other_memory import CONTEXT_BYTES, always_bytes, host_bytes, record_bytes, work_bytes

BIG = build_inventory(CONFIGS_DIR / "model" / "deepseekv3_671b.json")
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
MIB = 1 << 20
SIZES = {"actor_params": 2, "grads": 4, "optimizer": 12, "ref_params": 3, "rollout_weights": 5, "swap_window": 1}


def test_the_record_of_routed_experts_by_stage_and_phase():
    """1,024 samples of 4,096 tokens; the first stage has three dense layers. Control: nothing without a record."""
    model, tokens = BIG.model, 1024 * 4096
    assert [record_bytes(model, TRAIN, stage, tokens) for stage in (0, 2)] == [tokens * 32, tokens * 64]
    wide = replace(model, n_routed_experts=512)
    assert record_bytes(wide, TRAIN, 2, tokens) == tokens * 128
    passes = Passes(4096, 4096, 4096, micro_batches=64, recorded_tokens=tokens)
    last = [work_bytes(BIG, TRAIN, 255, phase, passes) for phase in ("old_log_prob", "ref", "update", "rollout")]
    assert [terms.get("routing_record") for terms in last] == [112 * tokens, 56 * tokens, 56 * tokens, None]
    without = work_bytes(BIG, TRAIN, 255, "update", replace(passes, recorded_tokens=0))
    assert without["routing_record"] == 0


def test_the_kv_caches_share_has_the_rollouts_buffers_and_the_context():
    hccl = {"train": 7, "rollout": 5}
    assert always_bytes(hccl, kv_cache=True) == {"hccl_buffers": 7}
    assert always_bytes(hccl, kv_cache=False) == {"hccl_buffers": 12, "cann_context": CONTEXT_BYTES}


@pytest.mark.parametrize(
    ("schedule", "stays", "options", "expected"),
    [
        (SCHEDULE, {"optimizer"}, {"swapped": True}, {"actor_params": 2, "ref_params": 3, "optimizer": 12}),
        (SCHEDULE, {"optimizer"}, {}, {"actor_params": 2, "ref_params": 3}),
        (SCHEDULE, {"optimizer"}, {"saves": True}, {"actor_params": 2, "ref_params": 3, "checkpoint": 12}),
        (SCHEDULE, {"actor_params", "grads", "ref_params"}, {"saves": True}, {"optimizer": 12, "checkpoint": 2}),
        (in_sleep_mode(SCHEDULE), {"optimizer"}, {}, {"actor_params": 2, "ref_params": 3, "rollout_weights": 5}),
        (VERL["a3"], set(), {}, {"actor_params": 2, "ref_params": 3, "optimizer": 12, "rollout_weights": 5}),
    ],
)
def test_what_is_loaded_has_a_copy_on_the_host(schedule, stays, options, expected):
    assert host_bytes(SIZES, schedule, stays, **{"swapped": False, "saves": False, **options}) == expected
