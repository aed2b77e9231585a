"""Test the comparison of operators on the emulated device, with and without planted faults."""

import contextlib
from unittest import mock

import pytest

EMULATED = ["recipe.line=a3", "recipe.platform=npu_emulated", "trainer.device=npu"]
LARGE = ["recipe.model_shape=model/deepseekv3_tiny_256experts.json"]
FUSED = [f"recipe.train.{prefix}gradient_accumulation_fusion=true" for prefix in ("", "gemm_")]
GRAPHS = [f"recipe.rollout.ascend.{option}" for option in ("graphs=true", "scheduler=ascend", "prefix_caching=false")]
RING = "recipe.rollout.ascend.chunked_prefill_for_mla=true"
# name -> operator, its results from the right one, and the expected verdict
CHANGES = {
    "rotary angles negated": (
        "npu_interleave_rope",
        lambda right, **given: right(**given | {"sin": -given["sin"]}),
        "wrong",
    ),
    "scales halved in combine": (
        "npu_moe_distribute_combine",
        lambda right, **given: right(**given | {"expert_scales": given["expert_scales"] / 2}),
        "wrong",
    ),
    "an argument is refused": (
        "npu_swiglu",
        lambda right, **given: right(**given | {"dim": "last"}),
        "failed: TypeError: npu_swiglu: argument 'dim' must be int, found str 'last'",
    ),
    "right, and not of this package": ("npu_add_rms_norm", lambda right, **given: right(**given), "ok"),
}


@contextlib.contextmanager
def changed(change):
    """Put another operator into the emulated torch_npu."""
    import torch_npu

    name, function, _ = CHANGES[change]
    right = getattr(torch_npu, name)
    with mock.patch.object(torch_npu, name, lambda **given: function(right, **given)):
        yield


def operator_rows(cases):
    """Return the rows of check_operators of tiny runs; a case is (overrides, change or None, with MC2)."""
    import torch.distributed as dist

    from tests.runs import composed
    from verl_patches.worker.probe.operators import check_mc2, check_operators

    found = []
    for overrides, change, with_mc2 in cases:
        run = composed("deepseekv3_tiny_cpu", [*EMULATED, *overrides])
        with changed(change) if change else contextlib.nullcontext():
            rows = check_operators(run, set())
            rows += [check_mc2(run, dist.new_group([0]))] if with_mc2 else []
        found.append(rows)
    return found


@pytest.mark.slow
@pytest.mark.upstream
def test_each_planted_fault_is_named_and_no_other_operator(run_emulated):
    tuned = [*LARGE, *FUSED, *GRAPHS, RING, "recipe.dtype=bf16"]
    cases = [([], None, False), (tuned, None, True), *((tuned, change, True) for change in CHANGES)]
    job = "tests.worker.probe.test_operators:operator_rows"
    ((eager, graphs, *found),) = run_emulated(job, cases, trees=("MindSpeed", "vllm-ascend"), backend="hccl")
    for row in (*eager, *graphs):
        assert row["verdict"] == "not checked here" and row["seconds"] > 0 and row["shape"], row
        assert 0 <= row["error"] <= row["tolerance"] < 0.03, row
    eager_only = {row["operator"] for row in eager} - {row["operator"] for row in graphs}
    assert eager_only == {"npu_gmm_backward"}
    for rows, (operator, _, verdict) in zip(found, CHANGES.values(), strict=True):
        (row,) = [row for row in rows if row["verdict"] != "not checked here"]
        assert operator in row["operator"] and row["verdict"] == verdict
        assert verdict != "wrong" or row["error"] > 10 * row["tolerance"]
