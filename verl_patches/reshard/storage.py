"""How a training parameter holds HF tensors, as each library stores them: one table.

HF kinds are those of layout/inventory.py. Kinds of one parameter are joined along HF rows, and under TP each rank joins
its own part of each: gated fc1 is [gate's part; up's part]. Shape letters: H hidden, F this rank's part of an expert's
intermediate size, e local experts.

    parameter                                  holds                                how                     libraries
    ...experts.local_experts.{expert}.fc1      routed gate, up of one expert        as HF, [2F, H]          megatron-*
    ...experts.linear_fc1.weight{expert}       the same by Transformer Engine       as HF, [2F, H]          megatron-*
    ...experts.weight1   shape [H, e * 2F]     routed gate, up of all local ones    view(e, H, 2F), each .t()   all
    ...experts.weight2   shape [e * F, H]      routed down of all local ones        view(e, F, H), each .t()    all
    ...self_attention.linear_qkv               q_a, kv_a (all of both under TP)     as HF                   mindspeed
    every other one                            one kind, or gate and up             as HF                   all

Sources: names are tabulated in layout/native.py, model/weights.py and model/mindspeed/weights.py. weight1 and weight2
are megatron-core's GroupedMLP: its forward in 0.12.2 (transformer/moe/experts.py:249) views them so, and so does
MindSpeed (core/transformer/moe/experts.py, groupedmlp_forward): weight1's shape does not say what is in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from verl_patches.errors import ConfigError
from verl_patches.model import weights as megatron
from verl_patches.model.mindspeed import weights as mindspeed

PLAIN, UP_STACK, DOWN_STACK = "as HF", "[H, e * 2F] used as view(e, H, 2F)", "[e * F, H] used as view(e, F, H)"
_STACKS = {".mlp.experts.weight1": UP_STACK, ".mlp.experts.weight2": DOWN_STACK}
# library of layout/sharding.py -> what its parameters are, by name
_PLACES: dict[str, Callable[[str], megatron.ParsedName]] = {
    "megatron-local": megatron.parse_name, "megatron-te": megatron.parse_name, "mindspeed": mindspeed.parse_name,
}  # fmt: skip


class Storage(NamedTuple):
    """What one parameter holds: kinds joined along rows, local layer, local expert (None: none, or all), and how."""

    kinds: tuple[str, ...]
    layer: int | None
    expert: int | None
    how: str

    @property
    def stacked(self) -> bool:
        """Whether it holds all experts of the rank."""
        return self.how != PLAIN

    def shape(self, joined: Sequence[int], count: int) -> tuple[int, ...]:
        """The parameter's own shape, given that of its joined HF tensors (of one expert, if stacked)."""
        if self.how == PLAIN:
            return tuple(joined)
        rows, columns = joined
        return (columns, count * rows) if self.how == UP_STACK else (count * columns, rows)

    def joined(self, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Views of the parameter in HF orientation: of each of `count` local experts in order, else the one there is.

        Expects the parameter's own shape (see `shape`).
        """
        if self.how == PLAIN:
            return [tensor]
        return (mindspeed.split_up if self.how == UP_STACK else mindspeed.split_down)(tensor, count)


def storage_of(name: str, library: str) -> Storage:
    """What the parameter or buffer `name` of a GPTModel chunk is; wrapper prefixes ("module.") are allowed.

    Raises ConfigError for a name that no DeepSeek-V3 parameter of `library` has, and for a library not in this table.
    """
    if library not in _PLACES:
        raise ConfigError(f"reshard: no training storage known for {library!r}; expected one of {', '.join(_PLACES)}")
    how = next((how for end, how in _STACKS.items() if name.endswith(end)), PLAIN)
    place = (mindspeed.parse_name if how != PLAIN else _PLACES[library])(name)  # one GroupedMLP, whatever the library
    return Storage(*place, how)
