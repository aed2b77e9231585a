"""The resharder in the real loop: what it moves, that it is proven, and that verl's own path still stands behind it."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]
EVERY = "recipe.reshard.verify=every"
MEGATRON = "actor_rollout_ref.actor.megatron"
OFFLOAD = (
    *(f"{MEGATRON}.{what}_offload=true" for what in ("param", "grad", "optimizer")),
    "actor_rollout_ref.ref.megatron.param_offload=true",
)


def assert_proven(run, limit=1e-5):
    assert run.summary["exit"] == "ok" and all(s["logprob_delta"]["mean"] < limit for s in run.steps)
    assert all(s["sync"]["verified"] and s["sync"]["syncs"] == 1 for s in run.steps)


def test_a_step_says_what_its_sync_moved(smoke):
    run = smoke()
    first, later = run.steps[0]["sync"], run.steps[1]["sync"]
    assert first["verified"] and not later["verified"]  # recipe.reshard.verify=first
    assert first["learnt"] and not later["learnt"]
    moved = later["received_bytes"]
    assert 0 < moved["mean"] <= moved["max"] and later["sent_bytes"]["mean"] == moved["mean"]
    assert later["collectives"] == 5 and 0 < later["peak_extra_bytes"] < 4 * (512 << 20)
    assert later["seconds"]["total"] <= run.steps[1]["seconds"]["reshard"] + 1e-3
    table = (run.folder / "progress.log").read_text()
    assert "sync MB" in table and f"{moved['max'] / 1e6:.3f}" in table


def test_verls_own_path_gives_the_same_steps(smoke):
    verls, ours = smoke("recipe.patches=[-reshard.*]"), smoke()
    assert all(s["sync"] is None for s in verls.steps)
    for one, other in zip(verls.steps, ours.steps, strict=True):
        assert one["grad_norm"] == other["grad_norm"] and one["logprob_delta"] == other["logprob_delta"]


def test_small_buckets_many_ranks_and_everything_offloaded(smoke):
    run = smoke(
        "--train-layout",
        "tp2ep2",
        "--rollout-tp",
        "2",
        "--steps",
        "2",
        EVERY,
        *OFFLOAD,
        "recipe.reshard.bucket_bytes=16384",
    )
    assert_proven(run)
    assert all(s["seconds"]["offload"] > 0 for s in run.steps)
    sync = run.steps[1]["sync"]
    assert not sync["learnt"]  # memory that comes back is known
    assert sync["collectives"] > 6 and sync["peak_extra_bytes"] <= 4 * 16384


def test_a_spoilt_map_stops_the_run_by_name(smoke):
    words = ("model.layers.2.mlp.experts.w2_weight", "loaded again", "expected", "found", "rank")
    run = smoke("--steps", "1", "recipe.worker_process_setup_hook=spoilt_reshard.swap_experts", ok=False)
    assert run.code == 1 and not run.steps
    assert all(word in run.summary["exit"] for word in words), run.summary["exit"]


def test_what_one_rank_cannot_map_goes_through_load_weights(smoke):
    """The others have mapped it, and get it whole too; the values are as right as through the map."""
    hook = "recipe.worker_process_setup_hook=spoilt_reshard.unmap_o_proj"
    run = smoke("--rollout-tp", "2", "--steps", "2", EVERY, hook)
    assert_proven(run)
    said = "weight sync of model.layers.3.self_attn.o_proj.weight goes through load_weights: spoilt"
    assert said in (run.folder / "driver.log").read_text()


@pytest.mark.upstream
def test_line_a3_with_verls_own_path(a3):
    run = a3("--steps", "2", "recipe.patches=[-reshard.*]")
    assert run.summary["exit"] == "ok" and all(s["sync"] is None for s in run.steps)
    assert [s["grad_norm"] for s in run.steps] == [s["grad_norm"] for s in a3().steps[:2]]
