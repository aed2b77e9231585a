"""Group regions that the same ranks hold in training and the same ranks need in rollout into blocks, sent as one.

Training and rollout cut a tensor along the same axis (layout/sharding.py), but not always at common rows, as vLLM pads
the vocabulary. The cuts of both sides together divide a tensor into elementary intervals, which no rank's shard divides
further. Tensors of one layer (or one expert) whose intervals are held and needed by the same ranks share one block for
each interval. So DeepSeek-V3 on 256 ranks has some 16,000 blocks, not one for each interval of each of its 45,395
tensors. Does not import torch.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from verl_patches.errors import Check, ConfigError, config_error_text
from verl_patches.layout.inventory import Inventory, ModelShape, Parameter, build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import Shard, library_rule, tensor_shards
from verl_patches.reshard.region import Region, align, row_bytes, shard_region
from verl_patches.spec import RunSpec

DEFAULT_BUCKET_BYTES = 512 << 20


class Block(NamedTuple):
    """Hold regions that are sent as one: each of `holders` has all of them, each of `receivers` needs all of them.

    `row_bytes`: bytes of one row of each region. Ranks are sorted; all holders are of one pipeline stage.
    """

    regions: tuple[Region, ...]
    row_bytes: tuple[int, ...]
    holders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of all elements."""
        return sum(r.rows * size for r, size in zip(self.regions, self.row_bytes, strict=True))

    @property
    def wire_bytes(self) -> int:
        """Return the bytes of all regions, aligned as in a bucket, if none is cut."""
        return sum(align(r.rows * size) for r, size in zip(self.regions, self.row_bytes, strict=True))


class _Interval(NamedTuple):
    """Describe rows [start, stop) along `axis` by who holds them in training and who needs them in rollout.

    `holders`, `receivers`: tp indices of ranks, for routed experts their etp indices.
    """

    axis: int
    start: int
    stop: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


def make_blocks(
    inventory: Inventory,
    train: ParallelLayout,
    rollout: ParallelLayout,
    train_library: str,
    rollout_library: str,
    bucket_bytes: int,
) -> list[Block]:
    """Return all blocks between two layouts, in the inventory's order of layers and experts.

    Raises ConfigError for pairs of layouts between which no plan can be made, as `local_parameters` does for either
    side, and where `bucket_bytes` is too small for one row of some tensor.
    """
    _check_layouts(train, rollout)
    sides = _RankIndex(inventory, train, train_library), _RankIndex(inventory, rollout, rollout_library)
    intervals: dict[tuple, list[_Interval]] = {}  # tensors of one kind and shape are cut alike
    blocks: list[Block] = []
    units: list[tuple[Parameter, ...]] = [(parameter,) for parameter in inventory.outer]
    for layer, experts in zip(inventory.layers, inventory.experts, strict=True):
        units += [layer, *experts]
    for tensors in units:
        alike: dict[tuple, list[tuple[Parameter, list[_Interval]]]] = defaultdict(list)
        for parameter in tensors:
            key = parameter.kind, parameter.shape
            if key not in intervals:
                held = tensor_shards(inventory, train, train_library, parameter)
                needed = tensor_shards(inventory, rollout, rollout_library, parameter)
                intervals[key] = list(_tensor_intervals(held, needed))
            rank_indices = tuple((interval.holders, interval.receivers) for interval in intervals[key])
            alike[rank_indices].append((parameter, intervals[key]))
        for members in alike.values():
            blocks += _group_blocks(members, *sides)
    most, region = max(pair for b in blocks for pair in zip(b.row_bytes, b.regions, strict=True))
    if not isinstance(bucket_bytes, int) or bucket_bytes < align(most):
        raise ConfigError(
            f"reshard plan: bucket_bytes must be a whole number of at least {align(most)}, the bytes of one row of "
            f"{region.name} along axis {region.axis}; found {bucket_bytes!r}. Set for example {DEFAULT_BUCKET_BYTES}"
        )
    return blocks


def _tensor_intervals(train: Sequence[Shard], rollout: Sequence[Shard]) -> Iterable[_Interval]:
    """Yield the intervals of one tensor; `train` and `rollout` are its shards by tp (etp) index."""
    parameter = train[0].parameter
    axes = {shard.axis for shard in (*train, *rollout) if shard.axis is not None}
    assert len(axes) <= 1, f"{parameter.name} is cut along axis {axes}"  # all libraries share the table AXES
    axis = axes.pop() if axes else 0
    held, needed = ([shard_region(s).along_axis(axis, parameter.shape) for s in shards] for shards in (train, rollout))
    cuts = {0, parameter.shape[axis]}
    for region in (*held, *needed):
        cuts |= {region.start, region.stop}
    for start, stop in itertools.pairwise(sorted(cuts)):
        holders, receivers = (
            tuple(i for i, region in enumerate(regions) if region.start <= start and stop <= region.stop)
            for regions in (held, needed)
        )
        yield _Interval(axis, start, stop, holders, receivers)


def _group_blocks(
    members: list[tuple[Parameter, list[_Interval]]], train: _RankIndex, rollout: _RankIndex
) -> Iterable[Block]:
    """Yield one block for each interval of tensors whose intervals are held and needed alike."""
    first, first_intervals = members[0]
    for number, interval in enumerate(first_intervals):
        parts = [(parameter, intervals[number]) for parameter, intervals in members]
        yield Block(
            tuple(Region(parameter.name, part.axis, part.start, part.stop) for parameter, part in parts),
            tuple(row_bytes(parameter, part.axis) for parameter, part in parts),
            train.ranks(first, interval.holders),
            rollout.ranks(first, interval.receivers),
        )


class _RankIndex:
    """Index the ranks of one layout by what they hold."""

    def __init__(self, inventory: Inventory, layout: ParallelLayout, library: str):
        model, self._last_stage = inventory.model, layout.pp - 1
        rule = library_rule(inventory, layout, library)
        self._stages = {i: s for s in range(layout.pp) for i in layout.stage_layers(s, model.num_hidden_layers)}
        self._groups: dict[tuple, list[int]] = defaultdict(list)  # (stage, ep index or None, tp or etp index) -> ranks
        self._ep_index: dict[int, int] = {}  # expert -> ep index
        self._ranks_by_key: dict[tuple, tuple[int, ...]] = {}
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            self._groups[at.pp, None, at.tp].append(rank)
            self._groups[at.pp, at.ep, at.etp].append(rank)
            experts = layout.local_experts(rank, model.n_routed_experts, rule.experts_rest_on_last)
            self._ep_index.update(dict.fromkeys(experts, at.ep))

    def ranks(self, parameter: Parameter, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return all ranks that hold one of the tp (etp) `indices` of `parameter`, sorted."""
        if parameter.layer is not None:
            stage = self._stages[parameter.layer]
        else:
            stage = 0 if parameter.kind == "embedding" else self._last_stage
        ep_index = None if parameter.expert is None else self._ep_index[parameter.expert]
        key = stage, ep_index, indices
        if key not in self._ranks_by_key:
            self._ranks_by_key[key] = tuple(sorted(rank for i in indices for rank in self._groups[stage, ep_index, i]))
        return self._ranks_by_key[key]


def _check_layouts(train: ParallelLayout, rollout: ParallelLayout) -> None:
    """Raise ConfigError for a pair of valid layouts between which no plan can be made."""
    if train.world_size != rollout.world_size:
        raise ConfigError(
            f"reshard plan: training has {train.world_size} ranks ({train}), rollout has {rollout.world_size} "
            f"({rollout}); expected equal numbers of ranks. Change one of the layouts"
        )
    for axis in ("cp", "pp", "vpp"):
        if getattr(rollout, axis) > 1:
            raise ConfigError(
                f"reshard plan: rollout {axis}={getattr(rollout, axis)} ({rollout}) is not supported; "
                f"expected {axis}=1. Use tp, ep or more instances instead"
            )


def run_blocks(run: RunSpec) -> Sequence[Block]:
    """Return the blocks of a run's weight sync; raises ConfigError where its training cannot serve its rollout."""
    libraries = run.train_library, run.rollout_library
    return _run_blocks(run.trained_model, run.train, run.rollout, *libraries, run.recipe.reshard.bucket_bytes)


@functools.lru_cache(8)  # a command reads the blocks of its run more than once
def _run_blocks(model: ModelShape, *sides: Any) -> Sequence[Block]:
    return make_blocks(build_inventory(model), *sides)


def sync_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the direct weight sync, where it is on, can serve these layouts with these buckets."""
    if run.samples and "reshard.direct" in run.rows:
        fault = config_error_text(run_blocks, run)
        yield Check("weight sync", not fault, fault or "every rank can receive the weights that it lacks")
