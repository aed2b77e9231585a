"""Errors and disagreements between the ranks of a weight sync, raised alike on all of them.

While there is no error only numbers are exchanged. Once one rank has an error, every rank gathers the texts and raises
the same message, so that none waits for ever in a collective.
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


def catch_errors(check: Callable[[], Iterable[str] | None]) -> list[str]:
    """The problems that `check` returns or yields, if any; an exception is one more, for `raise_on_any_rank`."""
    problems: list[str] = []
    try:
        problems.extend(check() or ())
    except Exception as why:
        problems.append(f"{type(why).__name__}: {why}")
    return problems


def raise_on_any_rank(problems: Sequence[str], group: Any, device: torch.device | str, todo: str) -> None:
    """Raise the same ReshardError on every rank if any has a problem; collective. `todo` begins the message."""
    if not _any_rank(len(problems), group, device):
        return
    every = gather((len(problems), list(problems[:_OF_A_RANK])), group)
    lines = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(every) for text in texts][:_SHOWN]
    left = sum(count for count, _ in every) - len(lines)
    if left:
        lines.append(f"and {left} more")
    raise ReshardError("\n  ".join([f"reshard: {todo}", *lines]))


def gather(value: Any, group: Any) -> list[Any]:
    """`value` of every rank, pickled: not for every sync."""
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def check_peers(plan: RankPlan, digest: str, group: Any, device: torch.device | str) -> None:
    """Raise ReshardError on all ranks unless what each rank sends is what its receiver expects, by one collective.

    Compares a hash of (digest, buckets, regions in order) for every pair of ranks; `digest` is the whole plan's.
    """
    peers = range(dist.get_world_size(group))
    sent = torch.tensor([_hash(digest, _regions(plan, "send", peer)) for peer in peers], device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    expected = [_hash(digest, _regions(plan, "receive", peer)) for peer in peers]
    wrong = {peer for peer, a, b in zip(peers, received.tolist(), expected, strict=True) if a != b}
    if _any_rank(len(wrong), group, device):
        complaints = gather(wrong, group)  # by receiver
        sends = gather({to: _regions(plan, "send", to) for to in peers if plan.rank in complaints[to]}, group)
        digests = gather(digest, group)
        problems = [
            _difference(peer, sends[peer][plan.rank], _regions(plan, "receive", peer)) for peer in sorted(wrong)
        ]
        if digest != digests[0]:
            problems.insert(0, f"its plan has the digest {digest}, that of rank 0 is {digests[0]}")
        todo = "ranks do not have the same plan; look for unequal layouts or versions"
        raise_on_any_rank(problems, group, device, todo)


def _any_rank(number: int, group: Any, device: torch.device | str) -> bool:
    """Whether `number` is more than 0 on any rank; collective."""
    flag = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _regions(plan: RankPlan, side: str, peer: int) -> list[list[Region]]:
    return [list(getattr(bucket, side).get(peer, ())) for bucket in plan.buckets]


def _hash(digest: str, regions: list[list[Region]]) -> int:
    text = repr((digest, [[tuple(region) for region in bucket] for bucket in regions]))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _difference(peer: int, sent: list[list[Region]], expected: list[list[Region]]) -> str:
    if len(sent) != len(expected):
        return f"has {len(expected)} buckets, rank {peer} has {len(sent)}"
    for number, (theirs, ours) in enumerate(zip(sent, expected, strict=True)):
        for at, (found, wanted) in enumerate(itertools.zip_longest(theirs, ours, fillvalue="nothing")):
            if found != wanted:
                return f"expected {wanted} from rank {peer} as region {at} of bucket {number}, found {found}"
    return f"the same regions as rank {peer}, but of another plan"
