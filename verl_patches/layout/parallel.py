"""Describe how a model is split over ranks, by one type for the training side (Megatron) and the rollout side (vLLM).

The same ranks have two views, exactly as `megatron.core.parallel_state.initialize_model_parallel` (0.12.2) builds
them: the dense view tp x cp x dp x pp, and the expert view etp x ep x edp x pp, the fastest axis first.

The rollout side fits in the same type: vLLM 0.9.1 (`vllm.distributed.parallel_state.initialize_model_parallel`)
orders ranks as instance x dp x tp, tp fastest (pipeline stages are not used), and its experts are split over all ranks
of one instance. So an instance is an expert-data-parallel replica: `instances == edp`, and the instance of a rank is
its `edp` coordinate. See `rollout_layout`.

run/resolve.py reads the layouts of a configuration. No torch.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from dataclasses import dataclass
from typing import Any

from verl_patches.errors import ConfigError

DENSE_AXES = ("tp", "cp", "dp", "pp")  # the fastest axis first
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Coordinates:
    """Hold a rank's coordinates in the dense view (tp, cp, dp, pp) and the expert view (etp, ep, edp, pp), from 0."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Describe over how many ranks, and along which axes, a model is split.

    Sizes count ranks. `ep`: ranks that experts are split over; `etp`: ranks that one expert is split over (None: `tp`,
    Megatron's rule). MindSpeed's "TP extends EP" at TP4 EP8 is ep=32, etp=1. `dp` and `edp` are derived. `vpp`: model
    chunks of a stage. `layers_per_stage`: layers of each stage, or of each of the pp*vpp chunks in model order when
    vpp > 1; None splits evenly. Raises ConfigError where Megatron would, or where a list does not fit.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = None  # type: ignore[assignment]  # __post_init__ sets a number
    pp: int = 1
    vpp: int = 1
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        if self.layers_per_stage is not None:
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        for name in ("world_size", "tp", "cp", "pp", "vpp", "ep", "etp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"layout: {name} must be a whole number >= 1, found {value!r}")
        for view, sizes in (("tp*cp*pp", (self.tp, self.cp, self.pp)), ("etp*ep*pp", (self.etp, self.ep, self.pp))):
            if self.world_size % math.prod(sizes):
                raise ConfigError(
                    f"layout: {view} = {'*'.join(map(str, sizes))} = {math.prod(sizes)} must divide world_size "
                    f"{self.world_size}; change the sizes, or use a multiple of {math.prod(sizes)} ranks"
                )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"layout: vpp={self.vpp} needs pp > 1; set vpp=1 or split the model over stages")
        if self.layers_per_stage is None:
            return
        chunks = self.pp * self.vpp
        if len(self.layers_per_stage) != chunks or any(not isinstance(n, int) or n < 0 for n in self.layers_per_stage):
            raise ConfigError(
                f"layout: layers_per_stage must hold {chunks} counts (pp {self.pp} x vpp {self.vpp}), "
                f"found {list(self.layers_per_stage)}; give one count per chunk"
            )

    @property
    def dp(self) -> int:
        """Return the number of replicas of the dense (non-expert) weights."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Return the number of replicas of the expert weights; on the rollout side, the number of vLLM instances."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`: one of tp, cp, dp, pp, etp, ep, edp."""
        return getattr(self, axis)

    def _strides(self, view: tuple[str, ...]) -> dict[str, int]:
        """Return {axis of one view: distance between neighbouring ranks along it}."""
        sizes = [self.size(axis) for axis in view]
        return dict(zip(view, itertools.accumulate(sizes[:-1], operator.mul, initial=1), strict=True))

    def coordinates(self, rank: int) -> Coordinates:
        """Return both views' coordinates of `rank`. Raises ConfigError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"layout: rank must be in 0..{self.world_size - 1}, found {rank}")
        return _all_coordinates(self)[rank]

    def groups(self, name: str) -> list[list[int]]:
        """Return all groups of ranks that differ only along `name`, in Megatron's order of groups and of ranks.

        `name`: one axis or several of one view joined by "-" ("tp-dp"), or "instance" (the ranks of one expert
        replica: one vLLM instance) or "instance-dp" (vLLM's DP group: the dp replicas inside one instance; equal to
        "dp" when edp is 1). Follows `RankGenerator.get_ranks`: "etp" there is the expert generator's "tp", "edp" its
        "dp".
        """
        if name == "instance-dp":
            fixed = ["tp", "cp", "pp", "edp"]
        else:
            axes = ["etp", "ep", "pp"] if name == "instance" else name.split("-")
            view = DENSE_AXES if set(axes) <= set(DENSE_AXES) else EXPERT_AXES
            if not set(axes) <= set(view):
                raise ConfigError(
                    f"layout: axes {name!r}: expected axes of one view, {DENSE_AXES} or {EXPERT_AXES}, joined by '-'"
                )
            fixed = [axis for axis in view if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            groups.setdefault(tuple(getattr(at, axis) for axis in fixed), []).append(rank)
        return list(groups.values())

    def chunk_layers(self, num_layers: int) -> list[range]:
        """Return the layer ids of each of the pp*vpp chunks in model order; chunk c is on stage c % pp.

        Raises ConfigError if the list does not add up to `num_layers`, or an even split has a remainder.
        """
        counts, chunks = self.layers_per_stage, self.pp * self.vpp
        if counts is None:
            if num_layers % chunks:
                raise ConfigError(
                    f"layout: {num_layers} layers do not split evenly over {chunks} chunks "
                    f"(pp {self.pp} x vpp {self.vpp}); give a list, e.g. layers=7,7,8,8,8,8,8,7"
                )
            counts = (num_layers // chunks,) * chunks
        if sum(counts) != num_layers:
            raise ConfigError(
                f"layout: layers_per_stage {list(counts)} adds up to {sum(counts)}, the model has {num_layers} layers; "
                f"expected {chunks} counts that add up to {num_layers}"
            )
        return [range(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(counts)])]

    def stage_layers(self, stage: int, num_layers: int) -> tuple[int, ...]:
        """Return the layer ids that pipeline stage `stage` holds, in model order over all its chunks."""
        return tuple(itertools.chain.from_iterable(self.chunk_layers(num_layers)[stage :: self.pp]))

    def local_experts(self, rank: int, num_experts: int, rest_on_last: bool = False) -> range:
        """Return the ids of the routed experts on `rank` (whole if etp is 1), contiguous as in Megatron and vLLM.

        With `rest_on_last` the last of the ep ranks also holds the remainder where `ep` does not divide `num_experts`
        (vLLM 0.9.1, `determine_expert_map`). Raises ConfigError if a rank would hold none, and without `rest_on_last`
        (Megatron) if there is a remainder.
        """
        if num_experts < self.ep:
            raise ConfigError(
                f"layout {self}: ep={self.ep} is more than the {num_experts} routed experts: ranks would hold none; "
                f"choose an ep of at most {num_experts}"
            )
        if num_experts % self.ep and not rest_on_last:
            raise ConfigError(
                f"layout {self}: ep={self.ep} must divide the number of routed experts {num_experts}; choose another ep"
            )
        local, index = num_experts // self.ep, self.coordinates(rank).ep
        is_last = rest_on_last and index == self.ep - 1
        return range(index * local, num_experts if is_last else (index + 1) * local)

    def __str__(self) -> str:
        """Return the short form that `parse_layout` reads, e.g. "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"."""
        sizes = {name: getattr(self, name) for name in ("tp", "cp", "pp", "vpp", "ep")}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "tp"]
        if self.etp != self.tp:
            words.append(f"etp{self.etp}")
        words.append(f"@{self.world_size}")
        if self.layers_per_stage is not None:
            words.append("layers=" + ",".join(map(str, self.layers_per_stage)))
        return " ".join(words)


@functools.lru_cache(maxsize=64)
def _all_coordinates(layout: ParallelLayout) -> list[Coordinates]:
    """Return the coordinates of every rank; cached because plans read all of them repeatedly."""
    views = [layout._strides(DENSE_AXES), layout._strides(EXPERT_AXES)]
    return [
        Coordinates(**{axis: rank // step % layout.size(axis) for view in views for axis, step in view.items()})
        for rank in range(layout.world_size)
    ]


def parse_layout(text: str) -> ParallelLayout:
    """Read the short form "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"; `str(layout)` writes it.

    Words in any order: tp cp pp vpp ep etp with a size, @ranks (required), layers=... . A missing size is 1, a missing
    etp is tp. Raises ConfigError for a word that is unknown, repeated, or unreadable.
    """
    values: dict[str, Any] = {}
    for word in text.split():
        if match := re.fullmatch(r"(tp|cp|pp|vpp|ep|etp|@)(\d+)", word):
            name, value = match[1].replace("@", "world_size"), match[2]
        elif match := re.fullmatch(r"(layers)=(\d+(?:,\d+)*)", word):
            name, value = "layers_per_stage", match[2]
        else:
            raise ConfigError(
                f'layout {text!r}: cannot read {word!r}; expected words such as "tp4 pp8 ep32 etp1 @256 layers=7,8"'
            )
        if name in values:
            raise ConfigError(f"layout {text!r}: {name} is given twice; expected once")
        values[name] = tuple(map(int, value.split(","))) if name == "layers_per_stage" else int(value)
    if "world_size" not in values:
        raise ConfigError(f'layout {text!r}: the number of ranks is missing; add it as "@256"')
    return ParallelLayout(**values)


def rollout_layout(instances: int, dp: int, tp: int, expert_parallel: bool = True) -> ParallelLayout:
    """Return the layout of `instances` vLLM instances, each of `dp` x `tp` ranks, numbered as vLLM 0.9.1 numbers them.

    With `expert_parallel` whole experts are split over the dp*tp ranks of an instance (ep = dp*tp, etp = 1); without
    it every expert is cut over those ranks (ep = 1, etp = dp*tp; vLLM's `FusedMoEParallelConfig.make`).
    """
    ep, etp = (dp * tp, 1) if expert_parallel else (1, dp * tp)
    return ParallelLayout(instances * dp * tp, tp=tp, ep=ep, etp=etp)
