"""The destination map in the engine that verl builds, after vLLM's own work on the loaded weights."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_is_filled_through_the_map(tp, tiny_model, run_rollout):
    """In bf16 but for the router, which row rollout.fp32_router keeps in fp32: copies cast as load_weights does."""
    engine = {"engine_kwargs": {"vllm": {"enable_expert_parallel": True}}}
    rollout = {"tensor_model_parallel_size": tp, "dtype": "bfloat16", **engine}
    expected = {"touched": [], "unmapped": {}, "valid": True, "differ": [], "derived": 0, "derived_from_copies": 1}
    assert run_rollout("destination_rank:learn_and_write", tiny_model, rollout, size=tp) == [expected] * tp
