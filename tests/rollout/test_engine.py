"""Rollout layouts as arguments of verl and vLLM."""

from __future__ import annotations

import pytest

from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.rollout.engine import drop_empty_image_arguments, llm_kwargs, rollout_overrides


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (rollout_layout(2, 1, 1), {"enable_expert_parallel": False}),
        (rollout_layout(1, 1, 2), {"enable_expert_parallel": True}),
        (rollout_layout(1, 1, 2, expert_parallel=False), {"enable_expert_parallel": False}),
        (rollout_layout(1, 2, 1), {"enable_expert_parallel": True, "data_parallel_size": 2}),
        (rollout_layout(2, 64, 2), {"enable_expert_parallel": True, "data_parallel_size": 64}),
        (rollout_layout(1, 128, 2), {"enable_expert_parallel": True, "data_parallel_size": 128}),
    ],
    ids=str,
)
def test_engine_arguments_of_a_layout(layout, expected):
    assert llm_kwargs(layout) == expected


def test_overrides_name_verl_keys():
    assert rollout_overrides(rollout_layout(2, 64, 2), 256) == {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_expert_parallel": True,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.data_parallel_size": 64,
    }


UNBUILDABLE = [rollout_layout(1, 1, 2, pp=2), ParallelLayout(world_size=4, tp=1, ep=2, etp=2)]


@pytest.mark.parametrize("layout", UNBUILDABLE, ids=str)
def test_layouts_that_cannot_be_built_are_refused(layout):
    with pytest.raises(ConfigError, match="rollout layout"):
        llm_kwargs(layout)


def test_rollout_must_cover_the_actor():
    with pytest.raises(ConfigError, match="has 2 ranks, the actor has 4"):
        rollout_overrides(rollout_layout(1, 1, 2), 4)


def test_image_arguments_go_only_without_a_limit():
    """Row rollout.llm_arguments; with a real LLM: tests/platform/test_cpu_vllm.py."""
    seen = []
    init = drop_empty_image_arguments(lambda self, **kwargs: seen.append(kwargs))
    init(None, model="m", limit_mm_per_prompt=None, disable_mm_preprocessor_cache=True)
    init(None, model="m", limit_mm_per_prompt={"image": 1}, disable_mm_preprocessor_cache=True)
    kept = {"limit_mm_per_prompt": {"image": 1}, "disable_mm_preprocessor_cache": True}
    assert seen == [{"model": "m"}, {"model": "m", **kept}]
