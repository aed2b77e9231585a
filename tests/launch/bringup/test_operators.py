"""Test the comparison of operators on the emulated device, with and without planted faults."""

import contextlib
import dataclasses
from unittest import mock

import pytest

EMULATED = ["recipe.line=a3", "recipe.platform=npu_emulated", "trainer.device=npu"]
LARGE = ["recipe.model_shape=model/deepseekv3_tiny_256experts.json"]
FUSED = [f"recipe.train.{prefix}gradient_accumulation_fusion=true" for prefix in ("", "gemm_")]
GRAPHS = [f"recipe.rollout.ascend.{key}=true" for key in ("graphs", "chunked_prefill_for_mla")]
# fault -> operator, and its result with the fault
FAULTS = {
    "rotary angles negated": ("npu_interleave_rope", lambda right, **given: right(**given | {"sin": -given["sin"]})),
    "scales halved in combine": (
        "npu_moe_distribute_combine",
        lambda right, **given: right(**given | {"expert_scales": given["expert_scales"] / 2}),
    ),
    "an operator that the device refuses": ("npu_swiglu", lambda right, **given: right(**given | {"dim": "last"})),
}


@contextlib.contextmanager
def planted(fault):
    """Put a fault into the emulated torch_npu."""
    import torch_npu

    name, wrong = FAULTS[fault]
    right = getattr(torch_npu, name)
    with mock.patch.object(torch_npu, name, lambda *args, **given: wrong(right, *args, **given)):
        yield


def operator_rows(cases):
    """Return the rows of check_operators, as dicts, of tiny runs; a case is (overrides, fault or None, with MC2)."""
    import torch.distributed as dist

    from tests.runs import composed
    from verl_patches.launch.bringup.operators import check_mc2, check_operators

    found = []
    for overrides, fault, with_mc2 in cases:
        run = composed("deepseekv3_tiny_cpu", [*EMULATED, *overrides])
        with planted(fault) if fault else contextlib.nullcontext():
            rows = check_operators(run)
            rows += [check_mc2(run, dist.new_group([0]))] if with_mc2 else []
        found.append([dataclasses.asdict(row) for row in rows])
    return found


@pytest.mark.slow
@pytest.mark.upstream
def test_each_planted_fault_is_named_and_no_other_operator(run_emulated):
    cases = [([], None, False), ([*LARGE, *FUSED, *GRAPHS, "recipe.dtype=bf16"], None, True)]
    cases += [([*cases[1][0]], fault, True) for fault in FAULTS]
    job = "tests.launch.bringup.test_operators:operator_rows"
    (found,) = run_emulated(job, cases, trees=("MindSpeed", "vllm-ascend"), backend="hccl")
    right, faulty = found[:2], dict(zip(FAULTS, found[2:], strict=True))
    for row in [row for rows in right for row in rows]:
        assert row["verdict"] == "not checked here" and row["seconds"] > 0, row
        assert 0 <= row["error"] <= row["tolerance"] < 0.03 and row["shape"], row
    eager, graphs = ({row["operator"] for row in rows} for rows in right)
    assert {"npu_gmm_backward", "_npu_rotary_embedding", "npu_multi_head_latent_attention"} == eager - graphs
    named = {f: [row for row in rows if row["verdict"] != "not checked here"] for f, rows in faulty.items()}
    assert {fault: len(rows) for fault, rows in named.items()} == dict.fromkeys(FAULTS, 1)
    for fault, (operator, _) in FAULTS.items():
        (row,) = named[fault]
        assert operator in row["operator"]
        refused = "refuses" in fault
        assert (
            row["verdict"].startswith("failed: TypeError: npu_swiglu: argument 'dim'")
            if refused
            else (row["verdict"] == "wrong" and row["error"] > 10 * row["tolerance"])
        ), row
