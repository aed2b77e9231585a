"""Draw random pairs of layouts on tiny models, all of which the planner must support, as a hypothesis strategy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from tests.reshard.cases import TINY, Case
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.layout.sharding import local_parameters

DTYPES = st.sampled_from(("bfloat16", "float32", "float16"))


@st.composite
def pairs(draw, worlds: Sequence[int]) -> Case:
    """Draw a case that both sides can hold, on one of `worlds` ranks; layers are uneven, stages may be empty."""
    world, layers = draw(st.sampled_from(worlds)), draw(st.integers(2, 4))
    model = replace(
        TINY,
        num_hidden_layers=layers,
        first_k_dense_replace=draw(st.integers(0, 2)),
        n_routed_experts=draw(st.sampled_from((6, 8))),
        n_shared_experts=draw(st.integers(0, 2)),
        q_lora_rank=draw(st.sampled_from((None, 8))),
        vocab_size=draw(st.sampled_from((36, 64, 72, 136))),
        torch_dtype=draw(DTYPES),
    )
    pp, tp, cp = _factors(draw, world, 3)
    ep, etp = _factors(draw, world // pp, 2)
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    instances, split = _factors(draw, world, 2)
    sizes = instances, split, world // instances // split, draw(st.booleans())
    try:
        train = ParallelLayout(world, tp, cp, ep, etp, pp, vpp, _partition(draw, layers, pp * vpp))
        rollout = rollout_layout(*sizes)
        case = Case(model, train, rollout)
        libraries = [
            draw(st.sampled_from(("megatron-local", "mindspeed"))),
            draw(st.sampled_from(("vllm", "vllm-ascend"))),
        ]
        for layout, library in zip((train, rollout), libraries, strict=True):
            for rank in range(world):
                local_parameters(case.inventory, layout, rank, library)
    except ConfigError:  # refusals are covered by the tests of layouts and shards
        return draw(pairs(worlds))
    return replace(
        case,
        train_library=libraries[0],
        rollout_library=libraries[1],
        rollout_dtype=draw(DTYPES),
        bucket_bytes=draw(st.sampled_from((400, 1 << 10, 1 << 13, 1 << 20))),
        seed=draw(st.integers(0, 99)),
    )


def _factors(draw, number: int, count: int) -> list[int]:
    """Draw `count` factors whose product divides `number`."""
    factors = []
    for _ in range(count):
        factors.append(draw(st.sampled_from([n for n in range(1, number + 1) if number % n == 0])))
        number //= factors[-1]
    return factors


def _partition(draw, layers: int, chunks: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=chunks - 1, max_size=chunks - 1)))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, layers]))
