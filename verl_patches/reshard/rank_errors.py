"""Errors and disagreements between the ranks of a weight sync, or of another exchange, raised alike on all of them.

While there is no error only numbers are exchanged. Once one rank has an error, every rank gathers the texts and raises
the same message, so that none waits in a collective for ever.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.errors import RecipeError
from verl_patches.reshard.plan import RankPlan
from verl_patches.reshard.region import Region

_SHOWN, _OF_A_RANK = 8, 3  # problems that a message lists


class ReshardError(RecipeError):
    """Weights cannot be moved as planned, or did not arrive: the message names parameter, rank, expected and found."""

    what = "reshard"


def catch_errors(check: Callable[[], Iterable[str] | None]) -> list[str]:
    """The problems that `check` returns, for `raise_on_any_rank`; if it raises, the exception is the only one."""
    try:
        return list(check() or ())
    except Exception as why:
        return [f"{type(why).__name__}: {why}"]


def raise_on_any_rank(
    problems: Sequence[str], group: Any, device: torch.device | str, todo: str, error: type[RecipeError] = ReshardError
) -> None:
    """Raise the same error on every rank if any has a problem; collective. `todo` begins the message.

    error: its class, whose `what` says what failed.
    """
    if not _any_rank(len(problems), group, device):
        return
    by_rank = gather((len(problems), problems[:_OF_A_RANK]), group)
    lines = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(by_rank) for text in texts][:_SHOWN]
    left = sum(count for count, _ in by_rank) - len(lines)
    if left:
        lines.append(f"and {left} more")
    raise error("\n  ".join([f"{error.what}: {todo}", *lines]))


def gather(value: Any, group: Any = None) -> list[Any]:
    """`value` of every rank, pickled: not for every sync."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_peers(plan: RankPlan, digest: str, device: torch.device | str) -> None:
    """Raise ReshardError on all ranks unless what each rank sends is what its receiver expects, by one collective.

    Compares a hash of (digest, buckets, regions in order) for every pair of ranks; `digest` is the whole plan's.
    """
    peers = range(dist.get_world_size())
    sent = torch.tensor([_hash(digest, _regions(plan, "send", peer)) for peer in peers], device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    expected = [_hash(digest, _regions(plan, "receive", peer)) for peer in peers]
    unequal = [peer for peer, a, b in zip(peers, received.tolist(), expected, strict=True) if a != b]
    if _any_rank(len(unequal), None, device):
        by_receiver = gather(unequal)
        sends = gather({to: _regions(plan, "send", to) for to in peers if plan.rank in by_receiver[to]})
        problems = [_difference(peer, sends[peer][plan.rank], _regions(plan, "receive", peer)) for peer in unequal]
        first_digest = gather(digest)[0]
        if digest != first_digest:
            problems.insert(0, f"its plan has the digest {digest}, that of rank 0 is {first_digest}")
        todo = "ranks do not have the same plan; look for unequal layouts or versions"
        raise_on_any_rank(problems, None, device, todo)


def _any_rank(number: int, group: Any, device: torch.device | str) -> bool:
    """Whether `number` is more than 0 on any rank; collective."""
    flag = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _regions(plan: RankPlan, side: str, peer: int) -> list[tuple[Region, ...]]:
    return [getattr(bucket, side).get(peer, ()) for bucket in plan.buckets]


def _hash(digest: str, regions: list[tuple[Region, ...]]) -> int:
    text = repr((digest, regions))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _difference(peer: int, sent: list[tuple[Region, ...]], expected: list[tuple[Region, ...]]) -> str:
    """The first difference between what `peer` sends this rank and what this rank expects, by bucket."""
    if len(sent) != len(expected):
        return f"has {len(expected)} buckets, rank {peer} has {len(sent)}"
    for number, pair in enumerate(zip(sent, expected, strict=True)):
        for at, (found, wanted) in enumerate(itertools.zip_longest(*pair, fillvalue="nothing")):
            if found != wanted:
                return f"expected {wanted} from rank {peer} as region {at} of bucket {number}, found {found}"
    return f"the same regions as rank {peer}, but of another plan"
