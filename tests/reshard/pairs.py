"""Random pairs of layouts on tiny models, as a hypothesis strategy: whatever the planner must be able to serve."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from hypothesis import strategies as st

from tests.reshard.cases import TINY, Case
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.layout.sharding import local_parameters

DTYPES = ("bfloat16", "float32", "float16")


@functools.cache
def train_grids(world_size: int) -> list[dict[str, int]]:
    """Every (tp, cp, pp, vpp, ep, etp) that makes a layout of `world_size` ranks: "TP extends EP" is etp=1."""
    sizes = [n for n in (1, 2, 4, 8) if n <= world_size]
    found = []
    for tp, cp, pp, vpp, ep, etp in itertools.product(sizes[:3], (1, 2), sizes[:3], (1, 2), sizes, sizes[:3]):
        grid = dict(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)
        try:
            ParallelLayout(world_size, **grid)
        except ConfigError:
            continue
        found.append(grid)
    return found


@functools.cache
def rollouts(world_size: int) -> list[ParallelLayout]:
    """Every way vLLM instances can share `world_size` ranks."""
    found = []
    for instances, dp, tp, pp, whole in itertools.product(*[(1, 2, 4, 8)] * 4, (True, False)):
        if instances * dp * tp * pp == world_size and tp <= 4 and (pp == 1 or dp == 1) and pp <= 2:
            found.append(rollout_layout(instances, dp, tp, pp, whole))
    return found


@st.composite
def pairs(draw, world_size: int) -> Case:
    """A case that both sides can hold; layers are spread unevenly, stages may be empty."""
    model = replace(
        TINY,
        num_hidden_layers=draw(st.integers(2, 4)),
        first_k_dense_replace=draw(st.integers(0, 2)),
        n_routed_experts=draw(st.sampled_from((6, 8))),
        n_shared_experts=draw(st.integers(0, 1)),
        q_lora_rank=draw(st.sampled_from((None, 8))),
        vocab_size=draw(st.sampled_from((64, 72, 136))),
        torch_dtype=draw(st.sampled_from(DTYPES)),
    )
    grid = draw(st.sampled_from(train_grids(world_size)))
    chunks = grid["pp"] * grid["vpp"]
    cuts = sorted(draw(st.lists(st.integers(0, model.num_hidden_layers), min_size=chunks - 1, max_size=chunks - 1)))
    layers = tuple(b - a for a, b in itertools.pairwise([0, *cuts, model.num_hidden_layers]))
    train = ParallelLayout(world_size, **grid, layers_per_stage=layers)
    names = [p.name for p in build_inventory(model).parameters]
    case = Case(
        model,
        train,
        _spread(draw(st.sampled_from(rollouts(world_size))), model),
        train_library=draw(st.sampled_from(("megatron-local", "mindspeed"))),
        rollout_library=draw(st.sampled_from(("vllm", "vllm-ascend"))),
        rollout_dtype=draw(st.sampled_from(DTYPES)),
        bucket_bytes=draw(st.sampled_from((400, 1 << 10, 1 << 13, 1 << 20))),
        whole=tuple(draw(st.lists(st.sampled_from(names), max_size=2, unique=True))),
        seed=draw(st.integers(0, 99)),
    )
    return case if servable(case) else draw(pairs(world_size))


def _spread(rollout: ParallelLayout, model: ModelShape) -> ParallelLayout:
    """Stages of one pipeline need a list where the layers do not divide."""
    if rollout.pp == 1 or model.num_hidden_layers % rollout.pp == 0:
        return rollout
    first = model.num_hidden_layers // 2
    return replace(rollout, layers_per_stage=(first, model.num_hidden_layers - first))


def servable(case: Case) -> bool:
    """Whether both sides can hold the model; what cannot is refused by sharding, which has its own tests."""
    inventory = case.inventory
    try:
        for rank in range(case.train.world_size):
            local_parameters(inventory, case.train, rank, case.train_library)
            local_parameters(inventory, case.rollout, rank, case.rollout_library)
    except ConfigError:
        return False
    return True
