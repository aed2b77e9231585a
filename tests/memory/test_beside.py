"""What is there throughout a phase, and host copies."""

import pytest

from verl_patches.layout.parallel import parse_layout
from verl_patches.memory.beside import CONTEXT_BYTES, always_bytes, host_bytes
from verl_patches.memory.schedule import SCHEDULE, VERL, in_sleep_mode

TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
MIB = 1 << 20
SIZES = {"actor_params": 2, "grads": 4, "optimizer": 12, "ref_params": 3, "rollout_weights": 5, "swap_window": 1}


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
