"""What verl's actor computes is taken where it is: on the device, before verl's worker moves it to the host.

verl's compute_log_prob and compute_ref_log_prob end with `output.to("cpu")` (verl/workers/megatron_workers.py, both
pins); at 54c9b736 `output` has the model's inputs too. Inside `taken` the worker gets rows without values instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def taken(actor: Any) -> Iterator[list[torch.Tensor]]:
    """[log-probs, entropies] of the one compute_log_prob that `actor` (MegatronPPOActor) runs inside, both [B, S].

    On this object alone, so rows on its class stand. The batch that it was given has no tensors afterwards.
    """
    found: list[torch.Tensor] = []
    compute = actor.compute_log_prob

    def take(data: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found[:] = compute(data, *args, **kwargs)
        data.batch = data.batch.select()
        nothing = found[0][:, :0]
        return nothing, nothing

    actor.compute_log_prob = take
    try:
        yield found
    finally:
        del actor.compute_log_prob
