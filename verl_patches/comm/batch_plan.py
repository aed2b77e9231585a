"""Where each sample of a step goes between rollout and update: plain data, equal on every rank that has the lengths.

A sample is a number: its place in the trainer's batch as generated (prompts in order, the G responses of one prompt
side by side). The plan says which train replica computes it, in which mini batch, micro batch and place, and what
every rank sends to every other in the one exchange that brings it there. GRPO groups may be torn apart: advantages are
computed on the driver, by sample, and come back in the order that `order` tells.

Mini batches are those of verl without balancing, whether this plan balances or not: rank order cut into one contiguous
share a replica, each share cut into mini batches. verl's own balance_batch changes them (RayPPOTrainer._balance_batch
says so itself). PPO epochs go over the same plan again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_patches.comm import micro_batches
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout


@dataclass(frozen=True)
class BatchPlan:
    """What each world rank holds, to which train replica it belongs, and what each replica computes.

    `held`: [rank] -> samples in the order that the rank has them after rollout; several ranks may hold the same one.
    `replica_of`: [rank] -> train DP rank. `schedule`: [replica][mini batch][micro batch] -> samples.
    """

    held: tuple[tuple[int, ...], ...]
    replica_of: tuple[int, ...]
    schedule: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @functools.cached_property
    def placed(self) -> tuple[tuple[int, ...], ...]:
        """[replica] -> its samples in the order in which it computes them."""
        return tuple(tuple(s for mini in mine for micro in mini for s in micro) for mine in self.schedule)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """All samples, as they come back when the replicas' results are joined in order of replicas."""
        return tuple(sample for mine in self.placed for sample in mine)

    def receives(self, rank: int) -> list[list[int]]:
        """[peer] -> samples that `rank` gets from it, in the order in which they are computed."""
        found: list[list[int]] = [[] for _ in self.held]
        for sample in self.placed[self.replica_of[rank]]:
            found[self._sender(sample, rank)].append(sample)
        return found

    def sends(self, rank: int) -> list[list[int]]:
        """[peer] -> samples that `rank` gives it, in the order in which the peer expects them."""
        found: list[list[int]] = [[] for _ in self.held]
        mine = set(self.held[rank])
        for peer, replica in enumerate(self.replica_of):
            found[peer] = [s for s in self.placed[replica] if s in mine and self._sender(s, peer) == rank]
        return found

    def tokens(self, lengths: Sequence[int]) -> tuple[int, float]:
        """(sum over all micro batches of the most tokens on any replica, the same if all replicas were equal)."""
        costs = [micro_batches.steps_cost([list(map(list, mini)) for mini in minis], lengths)
                 for minis in zip(*self.schedule, strict=True)]  # fmt: skip
        return sum(most for most, _ in costs), sum(mean for _, mean in costs)

    @functools.cached_property
    def digest(self) -> str:
        """Equal on two ranks if, and only if, they have the same plan."""
        return hashlib.sha256(repr((self.held, self.replica_of, self.schedule)).encode()).hexdigest()

    @functools.cached_property
    def _holders(self) -> Mapping[int, list[int]]:
        holders: dict[int, list[int]] = {}
        for rank, samples in enumerate(self.held):
            for sample in samples:
                holders.setdefault(sample, []).append(rank)
        return holders

    def _sender(self, sample: int, receiver: int) -> int:
        """The receiver itself if it holds the sample, else one of the holders, in turn over receivers."""
        holders = self._holders[sample]
        return receiver if receiver in holders else holders[receiver % len(holders)]


def plan_batch(
    held: Sequence[Sequence[int]],
    replica_of: Sequence[int],
    lengths: Sequence[int],
    *,
    mini_batch_size: int,
    micro_batch_size: int | None = None,
    token_budget: int | None = None,
    balance: bool = True,
    loss_agg_mode: str = "token-mean",
) -> BatchPlan:
    """The plan of one step; the same arguments give the same plan on every rank.

    `lengths`: [sample] -> tokens of prompt and response. `mini_batch_size`: samples (verl's ppo_mini_batch_size x
    rollout.n). Either `micro_batch_size` (samples a micro batch) or `token_budget` (tokens: dynamic batch size).
    `balance` orders by length; without it micro batches are those of arrival order. Raises ConfigError where sizes do
    not divide, where a sample is held by no rank, or where ranks and replicas do not fit.
    """
    if (micro_batch_size is None) == (token_budget is None):
        raise ConfigError("batch plan: expected micro_batch_size or token_budget, and not both")
    replicas = _replicas(held, replica_of, len(lengths))
    by_mini = []
    for share in mini_batches(len(lengths), replicas, mini_batch_size):
        if token_budget is not None:
            made = micro_batches.packed(share, lengths, token_budget, balance=balance)
        elif balance:
            whole = micro_batches.weight_depends_on_company(loss_agg_mode, micro_batch_size)
            made = micro_batches.balanced(share, lengths, micro_batch_size, move_whole=whole)
        else:
            made = micro_batches.arrival(share, micro_batch_size)
        by_mini.append(made)
    schedule = tuple(tuple(tuple(map(tuple, mini[replica])) for mini in by_mini) for replica in range(replicas))
    return BatchPlan(tuple(map(tuple, held)), tuple(replica_of), schedule)


def mini_batches(samples: int, replicas: int, mini_batch_size: int) -> list[list[range]]:
    """[mini batch][replica] -> samples, as verl forms them without balancing; ConfigError where sizes do not divide."""
    if samples % mini_batch_size or mini_batch_size % replicas:
        raise ConfigError(
            f"batch plan: {samples} samples in mini batches of {mini_batch_size} over {replicas} train replicas; "
            "expected each to divide the one before; change data.train_batch_size, actor.ppo_mini_batch_size (both "
            "count prompts: times rollout.n) or the train layout"
        )
    share, piece = samples // replicas, mini_batch_size // replicas
    return [[range(r * share + at, r * share + at + piece) for r in range(replicas)] for at in range(0, share, piece)]


def held_after_rollout(samples: int, groups: Sequence[int]) -> list[range]:
    """[rank] -> samples it holds: contiguous shares, one for each group, as equal as they can be.

    `groups`: [rank] -> number of its group. verl's dispatch makes each rank a group of its own (every rank keeps its
    part of what its tensor-parallel group made, sharding manager's postprocess_data); ranks that all keep what their
    group made have the group's number.
    """
    count = max(groups) + 1
    cuts = [samples * group // count for group in range(count + 1)]
    return [range(cuts[group], cuts[group + 1]) for group in groups]


def train_replicas(train: ParallelLayout) -> list[int]:
    """[rank] -> train DP rank."""
    return [train.coordinates(rank).dp for rank in range(train.world_size)]


def _replicas(held: Sequence[Sequence[int]], replica_of: Sequence[int], samples: int) -> int:
    if len(held) != len(replica_of):
        raise ConfigError(f"batch plan: {len(held)} ranks hold samples, {len(replica_of)} train; expected equally many")
    found = {sample for mine in held for sample in mine}
    if found != set(range(samples)):
        wrong = sorted(found ^ set(range(samples)))
        raise ConfigError(f"batch plan: expected samples 0..{samples - 1}, each on a rank; found {len(wrong)} held by "
                          f"none or unknown, the first is {wrong[0]}")  # fmt: skip
    twice = [rank for rank, mine in enumerate(held) if len(set(mine)) != len(mine)]
    if twice:
        raise ConfigError(f"batch plan: rank {twice[0]} holds a sample twice: {list(held[twice[0]])}")
    numbers = set(replica_of)
    if numbers != set(range(len(numbers))):
        raise ConfigError(f"batch plan: train replicas are {sorted(numbers)}; expected 0..{len(numbers) - 1}")
    return len(numbers)
