"""The plan's section about memory: both orders of the 256-die runs against a die, and the tiny run's bytes."""

import pytest

from verl_patches.cli.output import memory_rows
from verl_patches.config.compose import compose, model_shape_of
from verl_patches.launch.plan import memory_plan

pytestmark = pytest.mark.slow

BIG, TINY = "grpo_deepseekv3_256die_random_init", "grpo_deepseekv3_tiny_cpu"
ON = ("reshard.direct", "memory.order")


def plan(name, *overrides, rows=ON, skip=False):
    config = compose(name, [f"recipe.train.skip_old_log_prob={str(skip).lower()}", *overrides])
    return memory_plan(config, model_shape_of(config), rows)


def test_the_256_die_run_fits_in_the_order_that_it_follows_and_not_in_verls():
    found = plan(BIG)
    peaks = {schedule["order"]: schedule["peak_bytes"] for schedule in found["orders"]}
    assert list(peaks) == ["ours", "verl 54c9b736", "ours, with vLLM's sleep mode"]
    assert found["followed"] == "ours, with vLLM's sleep mode" and found["modelled"] and found["swapped"]
    assert peaks["ours"] == peaks[found["followed"]] <= found["hbm_bytes"] == 64 << 30 < peaks["verl 54c9b736"]
    title, columns, rows = memory_rows(found)
    assert "GB" in title and "follows ours, with" in title and all(len(row) == len(columns) for row in rows)
    own = found["followed"]
    assert columns == ("phase", own, "ours", "verl 54c9b736", f"memory groups, in {own}") and "the same" not in title
    wake = next(row for row in rows if row[0] == "wake_kv")
    assert wake[1] == "54.98" and wake[3] == "75.29 TOO MUCH"
    title, columns, _ = memory_rows(plan(BIG, rows=(*ON, "memory.sleep_mode")))  # equal figures, one column
    assert columns[1:3] == ("ours, addresses kept by vLLM", "verl 54c9b736") and "; ours: the same bytes" in title


@pytest.mark.slow
def test_the_followed_order_depends_on_the_rows_that_are_on():
    assert plan(BIG, rows=())["followed"] == "verl 54c9b736"
    back = plan(BIG, rows=("reshard.direct", "memory.sleep_mode"))
    assert back["followed"] == "verl 54c9b736, rollout weights not copied" == back["orders"][2]["order"]
    assert back["orders"][2]["peak_bytes"] > back["hbm_bytes"]  # the cache comes before training weights have gone
    gathered = plan(BIG, rows=("memory.order",))["orders"][2]["phases"][0]["bytes"]
    assert gathered["reshard_buffers"] != back["orders"][2]["phases"][0]["bytes"]["reshard_buffers"]
    rows = (*ON, "memory.sleep_mode")
    eager = "graphs=false multistream_mla=false multistream_moe=false view_optimize=true".split()
    own = plan(BIG, *(f"recipe.rollout.ascend.{option}" for option in eager), rows=rows)
    assert own["followed"] == "ours" and len(own["orders"]) == 2
    kept = plan(BIG, "recipe.weight_sync.enabled=false", rows=rows)
    assert kept["followed"] == "ours, with vLLM's sleep mode"  # weights that no sync brings again are copied


def bytes_of(group, *overrides, **options):
    """{phase: bytes of a memory group} in our order."""
    return {p["phase"]: p["bytes"].get(group) for p in plan(BIG, *overrides, **options)["orders"][0]["phases"]}


def test_params_that_are_not_offloaded_keep_their_grads_on_the_device_in_every_phase():
    resident = bytes_of("grads", "actor_rollout_ref.actor.megatron.param_offload=false")
    assert all((size or 0) > 13e9 for size in resident.values())
    assert bytes_of("grads")["rollout"] is None


@pytest.mark.parametrize(
    ("override", "group"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.7", "kv_cache"),
        ("recipe.reshard.bucket_bytes=268435456", "reshard_buffers"),
        ("recipe.train.swap_optimizer=false", "optimizer"),
        ("recipe.tensor_cache.enabled=true", "tensor_cache"),
    ],
)
def test_keys_of_the_configuration_reach_the_bytes(override, group):
    assert bytes_of(group, override) != bytes_of(group)


@pytest.mark.slow
def test_most_bytes_of_the_tensor_cache():
    """512 prompts of 16 samples over 8 replicas: ids of 1024 + 3072, log-probs of 3072 twice, or three times."""

    def cached(*overrides, skip=True):
        return bytes_of("tensor_cache", "recipe.tensor_cache.enabled=true", *overrides, skip=skip)

    assert cached()["ref"] == 512 * 16 // 8 * 4 * (1024 + 3072 * 3) and "old_log_prob" not in cached()
    assert cached(skip=False)["ref"] == 512 * 16 // 8 * 4 * (1024 + 3072 * 4)
    short = cached("data.max_response_length=1024", "actor_rollout_ref.actor.use_kl_loss=false")
    assert short["ref"] == 1024 * 4 * 1024 * 3


def test_a_cpu_has_no_die_to_compare_with():
    found = plan(TINY)
    assert found["hbm_bytes"] is None and found["followed"] == "ours, with vLLM's sleep mode"
    title, _, rows = memory_rows(found)
    assert " MB " in title and not any("TOO MUCH" in cell for row in rows for cell in row)
