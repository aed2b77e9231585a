"""Test line a3 on npu_emulated: vLLM's engine V1 with vllm-ascend in the loop, in layouts and graphs of production.

Dynamo traces the decode step of runs with graphs. vLLM's ranks that split experts exchange tokens by MC2 in it.
"""

import json

import pytest
from loop_runs import OFFLOAD, VERIFY, assert_caught, assert_nobody_else_can_reach, assert_weights_arrive, hook
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests.near_ties import norm_tolerance
from verl_patches.launch.smoke import PROOF_TEXTS
from verl_patches.plan.memory_plan import recompute_keys
from verl_patches.plan.search import as_overrides
from verl_patches.run import hccl
from verl_patches.run.environment import CONFIG_FILE, FACTS_FILE
from verl_patches.spec import read_run
from verl_patches.worker.probe.operators import operator_cases

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
# mixed batches of decodes and prefills need the ring kernel, or whole prompts
GRAPHS = ("graphs=true", "graph_batch_sizes=[8]", "chunked_prefill_for_mla=true")
MULTISTREAM = (*GRAPHS, "multistream_mla=true", "multistream_moe=true", "view_optimize=false")
VLLM_SLEEP = "recipe.patches=[-memory.sleep_mode]"
EVERYTHING = (  # all but the swapped optimizer
    *(option for option in OFFLOAD if ".optimizer_offload" not in option),  # the swapped optimizer is for bf16
    "recipe.train.skip_old_log_prob=true",
    "recipe.train.moe_alltoall_overlap_comm=true",
    "recipe.train.gemm_gradient_accumulation_fusion=true",
    "recipe.tensor_cache.enabled=true",
    "recipe.memory.ledger=strict",
    "recipe.profile.steps=[1]",
    "recipe.profile.phases=[rollout]",
)
REPLAY = "recipe.train.routing_replay=R2"
MC2 = {"npu_moe_distribute_dispatch", "npu_moe_distribute_combine"}


def with_options(options):
    return [f"recipe.rollout.ascend.{option}" for option in options]


@pytest.fixture(scope="session")
def emulated(a3):
    """Return emulated(steps, *arguments, ok=True) -> Finished; the run without more arguments measures memory."""

    def run(*arguments, ok=True):
        return a3("--emulate-npu", "--steps", *arguments, ok=ok, cold=arguments == ("2",))

    return run


def test_every_row_is_active_and_the_engine_is_that_of_vllm_ascend(emulated):
    run = emulated("2")
    assert run.summary["platform"] == "npu_emulated"
    assert_weights_arrive(run)
    needed = json.loads((run.folder / FACTS_FILE).read_text())["rows"]
    active = {row["id"] for row in run.summary["patches"] if row["state"] == "active"}
    assert {*needed} == active  # docs/patches.md says so
    assert [step["preempted"] for step in run.steps] == [0, 0]  # counted; None where no engine counts
    assert run.summary["peak_rss_bytes"]["total"] < 12 * 2**30
    assert_nobody_else_can_reach(run)
    called = run.summary["emulated"]["functions"]
    assert {"npu_moe_gating_top_k", "npu_grouped_matmul", "_npu_flash_attention"} < called.keys()
    assert f"This proved: {PROOF_TEXTS['a3 npu_emulated']}." in run.output.splitlines()


def is_not_made_here(group, world):
    """Return whether a group is gloo's here, or a mesh dimension over all ranks, whose own group torch 2.13 takes."""
    return group.name == "unfinished requests" or (group.name.startswith("verl's mesh") and group.ranks == world)


def assert_buffers_as_planned(run):
    """Assert the buffers of the first worker's groups of more than one rank, in the order of creation."""
    spec = read_run((run.folder / FACTS_FILE).read_text(), OmegaConf.load(run.folder / CONFIG_FILE))
    made = [group for group in run.summary["emulated"]["groups"] if group["ranks"] > 1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hccl, "MC2_MIN_RANKS", 2)  # here
        planned = [group for group in hccl.hccl_groups(spec) if not is_not_made_here(group, spec.world_size)]
    small = spec.recipe.hccl.small_groups_mib
    assert [(group["ranks"], group["config"].get("hccl_buffer_size")) for group in made] == [
        (group.ranks, small if group.small else None) for group in planned
    ]


def assert_bringup_compares_the_operators(run):
    """Assert that bringup's rung of operators, and MC2's rung, compare those that the run's workers called."""
    spec = read_run((run.folder / FACTS_FILE).read_text(), OmegaConf.load(run.folder / CONFIG_FILE))
    compared = {name for case in operator_cases(spec) for name in case.names}
    called = run.summary["emulated"]["functions"].keys()
    assert called <= compared | MC2 and len(called) > 20


def responses(run, step):
    """Return a step's responses as lists of tokens, without order; 0 behind an end token, where the cache pads."""
    recorded = load_file(run.folder / "rollouts" / f"step_{step['step']}.safetensors")
    found = recorded["responses"]
    return sorted((found * recorded["attention_mask"][:, -found.shape[1] :]).tolist())


def assert_equal_steps(run, first):
    """Assert equal tokens, rewards and gradients in each step of both runs."""
    for step, expected in zip(run.steps, first.steps, strict=True):
        assert responses(run, step) == responses(first, expected)
        assert step["reward"] == expected["reward"]
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm_tolerance(step["step"], 1e-5))


def recomputed(layers):
    """Return the overrides for `layers` recomputed layers of the stages."""
    return as_overrides(recompute_keys(layers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks", "graphs"),
    [
        pytest.param(
            "pp2", ("rollout=tp2", REPLAY, VLLM_SLEEP, *recomputed([2, 1])), GRAPHS, marks=pytest.mark.nightly
        ),
        (
            "tp2ep2",
            ("rollout=tp2dp2", *EVERYTHING, *recomputed(2), hook("print_watched_groups")),
            (*MULTISTREAM, "graph_batch_sizes=[4,8]"),
        ),
    ],
)
def test_layouts_and_graphs_change_no_step(emulated, layout, ranks, graphs):
    """Check layouts with whole experts over TP x EP and stages as a list of layers, as in production."""
    options = *with_options(graphs), VERIFY, "recipe.expert_load=true"
    run, first = emulated("2", f"layout={layout}", *ranks, *options), emulated("2")
    assert_weights_arrive(run, verified=True)
    reached = run.summary["emulated"]
    assert MC2 < reached["functions"].keys()
    assert reached["graphs"] > 1
    assert_buffers_as_planned(run)
    assert_bringup_compares_the_operators(run)
    if EVERYTHING[0] in ranks:
        assert all("log_prob" not in s["seconds"] and s["tensor_cache"]["received_bytes"] > 0 for s in run.steps)
        assert all(s["memory"]["violations"]["count"] == 0 and s["offload"]["moves"] for s in run.steps)
        assert "vLLM's dp 0,2" in run.log and "vLLM's dp 1,3" in run.log  # counted by the watch
        trace, memory = run.steps[0]["profile"]["files"]
        assert (run.folder / "profile" / trace).name == "trace_view.json" and memory.endswith("rollout.memory.pickle")
    layers = [2, 1] if layout == "pp2" else 2
    assert (run.summary["recompute_layers"], first.summary["recompute_layers"]) == (layers, 0)
    if REPLAY in ranks:  # one mini batch: the update has the weights of the pass that recorded
        assert all(step["routing_replay"]["agreement"] == 1 for step in run.steps)
    loads = [step["expert_load"]["train"] for step in run.steps]
    assert len(loads) == 2 and all(load["max_over_mean"] >= load["mean_over_layers"] > 1 for load in loads)
    assert_equal_steps(run, first)


@pytest.mark.parametrize(
    "level",
    [pytest.param("safe", marks=pytest.mark.nightly), "reference", pytest.param("tuned", marks=pytest.mark.nightly)],
)
def test_a_level_changes_no_step(emulated, level):
    """Check which of vllm-ascend's attention kernels a level calls, beside its rows and the equal steps."""
    run = emulated("2", f"level={level}", "layout=tp2ep2", "rollout=tp2dp2", VERIFY)
    first = emulated("2")
    assert_weights_arrive(run, verified=True)
    called = run.summary["emulated"]["functions"].keys()
    if level != "tuned":  # kernels that the published runs never called, of decodes beside prompts
        assert not {"npu_ring_mla", "npu_multi_head_latent_attention"} & called
    assert (run.summary["emulated"]["graphs"] > 0) == (level != "safe")
    assert_bringup_compares_the_operators(run)
    active = {row["id"] for row in run.summary["patches"] if row["state"] == "active"}
    assert ("rollout.no_collector" in active) == (level == "tuned") and "rollout.ascend_decode_kv" in active
    assert_equal_steps(run, first)


@pytest.mark.nightly
def test_a_sleep_that_frees_nothing_ends_the_run_before_step_one(emulated):
    """Check the failure; in the two runs above each sleep of each rank is checked in both sleep modes."""
    run = emulated("1", "rollout=dp2", VLLM_SLEEP, *with_options(GRAPHS), hook("sleep_frees_nothing"), ok=False)
    assert run.code == 1 and not run.steps and "RecipeError" in run.summary["exit"], run.summary["exit"]
    for words in ("rank 1: expected", "bytes more free memory", "rollout_weights", "kv_cache", "memory.sleep_mode on"):
        assert words in run.summary["exit"], run.summary["exit"]


@pytest.mark.nightly
def test_context_parallel_ranks_and_dynamic_micro_batches_change_no_step(emulated):
    """Let two ranks share each micro batch and split the experts; responses are equally long."""
    actor = "actor_rollout_ref.actor"
    more = f"{actor}.megatron.context_parallel_size=2", f"{actor}.use_dynamic_bsz=true"
    run, first = emulated("2", *more, f"{actor}.ppo_max_token_len_per_gpu=272", VERIFY), emulated("2")
    assert_weights_arrive(run, verified=True)
    assert_buffers_as_planned(run)
    assert_equal_steps(run, first)


@pytest.mark.slow
def test_the_gradient_is_that_of_platform_cpu(emulated, a3):
    """Compare in fp32; the model with 256 experts is not that of the other lines' runs."""
    first = emulated("2")
    model = OmegaConf.load(first.folder / "config.yaml").actor_rollout_ref.model.path
    given = "recipe.model_shape=model/deepseekv3_tiny_256experts.json", f"actor_rollout_ref.model.path={model}"
    replayed = a3("--steps", "1", "--replay-rollout", str(first.folder), *given)
    assert replayed.steps[0]["grad_norm"] == pytest.approx(first.steps[0]["grad_norm"], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spoil", "more"),
    [
        ("drop_bias", ("recipe.patches=[-reshard.*]",)),
        ("missing_all_reduce", ("rollout=tp2",)),
        ("wrong_dp_rank", ("rollout=dp2", "recipe.patches=[-reshard.*]")),
    ],
)
def test_spoilt_weights_and_ranks_are_caught_at_step_one(emulated, spoil, more):
    """Run two of them without the direct weight sync, which refuses them by itself (tests/reshard)."""
    assert_caught(emulated("1", *more, hook(spoil), ok=False), 1)


@pytest.mark.nightly
def test_a_skipped_sync_is_caught_at_the_first_step_that_skips(emulated):
    """Check that step 1 is right, also with verl's own sync and experts over DP ranks: the control of wrong_dp_rank."""
    options = "rollout=dp2", "recipe.patches=[-reshard.*]", "recipe.weight_sync.enabled=false"
    run = emulated("2", *options, hook("spoil_nothing"), ok=False)
    assert run.steps[0]["logprob_delta"]["max"] < 1e-5 and run.steps[0]["sync"] is None
    assert run.steps[0]["grad_norm"] == pytest.approx(emulated("2").steps[0]["grad_norm"], rel=1e-4)
    assert_caught(run, 2)
