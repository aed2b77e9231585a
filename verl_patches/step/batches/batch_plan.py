"""Plan which train replica computes each sample of a step, in which micro batch, and which rank sends it there.

A plan is plain data, equal on every rank that has the same lengths. A sample is its index in the trainer's batch as
generated (the responses of one prompt are adjacent). After rollout, ranks hold contiguous shares in rank order. A GRPO
group may be split over replicas, as the trainer computes advantages by sample.

Replicas that share an expert group exchange tokens in every layer, so all of them wait in their n-th micro batch for
the one whose n-th micro batch is the longest. The cost of a group's update is therefore the sum, over n, of the most
tokens on any of its replicas; the cost of an update is the highest of all groups. Samples are sorted by length and cut
into slots, which have one sample for each replica of a group and are as long as their longest. For one group and micro
batches of one sample this is optimal, for any cost that rises with length: over D replicas the k*D+1 longest samples
need k+1 slots or more, so in any assignment the (k+1)-th longest slot is at least as long as the (k*D+1)-th longest
sample, and here it is exactly that long. Several groups get equally many slots; the longest slot goes to the group with
the fewest tokens so far. Within a slot, the longest sample goes to the replica with the fewest tokens in this micro
batch, then in all. The longest micro batches run first, so that a lack of memory shows at once.

Gradients do not depend on the plan with row update.sample_weights (micro_batches.py). Without it verl's Megatron actor
averages the loss of each micro batch by itself, and Megatron divides by their number: with loss_agg_mode token-mean
the weight of a sample depends on the others of its micro batch.

Mini batches are those that verl forms without trainer.balance_batch: each replica's contiguous share is cut into
mini batches. PPO epochs repeat the plan.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from verl_patches.layout.parallel import ParallelLayout

Samples = Sequence[int]
Replicas = list[list[list[int]]]  # [replica][micro batch] -> samples


def arrival_batches(mini_batch: Sequence[Samples], micro_batch_size: int) -> Replicas:
    """Return micro batches in verl's order of samples; `mini_batch`: [replica] -> samples of one mini batch."""
    return [_chunks(list(samples), micro_batch_size) for samples in mini_batch]


def balanced_batches(
    mini_batch: Sequence[Samples], lengths: Sequence[int], micro_batch_size: int, group_replicas: int | None = None
) -> Replicas:
    """Return micro batches of `micro_batch_size` samples, equally long on all replicas.

    `lengths`: tokens by sample. `group_replicas`: replicas of an expert group, by default all.
    """
    found = []
    for slots in _slots(mini_batch, lengths, group_replicas or len(mini_batch)):
        found += _assign_samples(_chunks(slots, micro_batch_size), lengths)
    return found


def packed_batches(
    mini_batch: Sequence[Samples],
    lengths: Sequence[int],
    token_budget: int,
    *,
    balance: bool = True,
    group_replicas: int | None = None,
) -> Replicas:
    """Return micro batches of at most `token_budget` tokens, equally many of them on each replica.

    They have any number of samples. With `balance` whole slots are packed, for all replicas of an expert group at once,
    as if all samples of a slot were as long as its longest; otherwise each replica packs its own share.
    `group_replicas` as in `balanced_batches`. No sample is longer than the budget (micro_batch_checks).
    """
    own = [list(samples) for samples in mini_batch]
    if balance:
        groups, found = _slots(mini_batch, lengths, group_replicas or len(mini_batch)), []
        bins = _equal_bins([[lengths[slot[0]] for slot in slots] for slots in groups], token_budget)
        for slots, group_bins in zip(groups, bins, strict=True):
            found += _assign_samples([[slots[i] for i in places] for places in group_bins], lengths)
        return found
    bins = _equal_bins([[lengths[sample] for sample in samples] for samples in own], token_budget)
    return [[[samples[i] for i in places] for places in each] for samples, each in zip(own, bins, strict=True)]


def token_cost(replicas: Replicas, lengths: Sequence[int], group_replicas: int | None = None) -> tuple[int, float]:
    """Return (sum over micro batches of the most tokens on any replica, that sum if all replicas were equal).

    With several expert groups, of `group_replicas` replicas each, the first is the highest sum of a group.
    """
    tokens = [[sum(lengths[sample] for sample in batch) for batch in batches] for batches in replicas]
    groups = _chunks(tokens, group_replicas or len(tokens))
    return max(sum(map(max, zip(*group, strict=True))) for group in groups), sum(map(sum, tokens)) / len(replicas)


def _chunks(values: Sequence, size: int) -> list:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _slots(mini_batch: Sequence[Samples], lengths: Sequence[int], group_replicas: int) -> list[list[list[int]]]:
    """Return [expert group] -> its slots of `group_replicas` samples; slots, and samples in each, longest first."""
    order = sorted((sample for samples in mini_batch for sample in samples), key=lambda sample: -lengths[sample])
    slots = _chunks(order, group_replicas)
    # a round has a slot for each expert group; they are dealt as the samples of a slot are to its replicas
    rounds = _chunks(range(len(slots)), len(mini_batch) // group_replicas)
    dealt = _assign_samples([rounds], [lengths[slot[0]] for slot in slots])
    return [[slots[place] for place in places] for (places,) in dealt]


def _assign_samples(batches: Sequence[Sequence[Samples]], lengths: Sequence[int]) -> Replicas:
    """Give each replica one sample of each slot; `batches`: [micro batch][slot] -> its samples, longest first."""
    replicas = range(len(batches[0][0]))
    dealt: Replicas = [[] for _ in replicas]
    totals = [0 for _ in replicas]
    for slots in batches:
        tokens = [0 for _ in replicas]
        for replica_batches in dealt:
            replica_batches.append([])
        for slot in slots:
            by_load = sorted(replicas, key=lambda replica: (tokens[replica], totals[replica], replica))
            for replica, sample in zip(by_load, slot, strict=True):
                dealt[replica][-1].append(sample)
                tokens[replica] += lengths[sample]
                totals[replica] += lengths[sample]
    return dealt


def _equal_bins(costs: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
    """Return, for each list of costs, bins of its indices that sum to `budget` at most, equally many for all lists.

    The highest cost goes first, to the emptiest bin; the number of bins rises until all fit.
    """
    fewest = max(-(-sum(own) // budget) for own in costs)
    for count in range(max(fewest, 1), max(map(len, costs)) + 1):
        bins = [_fill_bins(own, count) for own in costs]
        if all(sum(own[i] for i in fullest) <= budget for own, (fullest, *_) in zip(costs, bins, strict=True)):
            return bins
    raise AssertionError("one cost per bin fits, as none is above the budget")


def _fill_bins(costs: Sequence[int], count: int) -> list[list[int]]:
    """Spread indices over `count` bins; return the bins, the costliest first."""
    emptiest = [(0, 0, number) for number in range(count)]  # tokens, samples, bin: a tie goes to an empty bin
    bins: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        total, size, number = heapq.heappop(emptiest)
        bins[number].append(at)
        heapq.heappush(emptiest, (total + costs[at], size + 1, number))
    return sorted(bins, key=lambda each: -sum(costs[at] for at in each))


@dataclass(frozen=True)
class BatchPlan:
    """Hold the samples that each replica computes; ranks send and receive samples accordingly.

    `replica_by_rank`: [rank] -> train DP rank. `schedule`: [replica][mini batch][micro batch] -> samples.
    """

    replica_by_rank: tuple[int, ...]
    schedule: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @functools.cached_property
    def replica_samples(self) -> tuple[tuple[int, ...], ...]:
        """Return [replica] -> its samples in the order in which it computes them."""
        return tuple(tuple(s for mini in minis for micro in mini for s in micro) for minis in self.schedule)

    @functools.cached_property
    def rollout_samples(self) -> tuple[range, ...]:
        """Return [rank] -> samples that it holds after rollout: contiguous shares whose sizes differ by one at most."""
        samples, world = sum(map(len, self.replica_samples)), len(self.replica_by_rank)
        return tuple(range(samples * rank // world, samples * (rank + 1) // world) for rank in range(world))

    def received_samples(self, rank: int) -> list[list[int]]:
        """Return [peer] -> samples that `rank` receives from it, in the order in which they are computed."""
        found: list[list[int]] = [[] for _ in self.rollout_samples]
        starts = [samples.start for samples in self.rollout_samples]
        for sample in self.replica_samples[self.replica_by_rank[rank]]:
            found[bisect.bisect_right(starts, sample) - 1].append(sample)
        return found

    def sent_samples(self, rank: int) -> list[list[int]]:
        """Return [peer] -> samples that `rank` sends to it, in the order in which the peer computes them."""
        by_replica = [[s for s in samples if s in self.rollout_samples[rank]] for samples in self.replica_samples]
        return [by_replica[replica] for replica in self.replica_by_rank]

    def token_cost(self, lengths: Sequence[int], group_replicas: int | None = None) -> tuple[int, float]:
        """Return the sums over all mini batches of both numbers that the function `token_cost` returns."""
        costs = [token_cost(list(minis), lengths, group_replicas) for minis in zip(*self.schedule, strict=True)]
        return sum(most for most, _ in costs), sum(mean for _, mean in costs)


def plan_batch(
    replica_by_rank: Sequence[int],
    lengths: Sequence[int],
    *,
    mini_batch_size: int,
    micro_batch_size: int | None = None,
    token_budget: int | None = None,
    balance: bool = True,
    group_replicas: int | None = None,
) -> BatchPlan:
    """Return the plan of one step; equal arguments give equal plans on all ranks.

    `replica_by_rank`: [rank] -> train DP rank. `lengths`: [sample] -> tokens of prompt and response. `mini_batch_size`:
    samples (verl's ppo_mini_batch_size x rollout.n). Either `micro_batch_size` (samples) or `token_budget` (tokens of a
    micro batch: dynamic batch size) is given. Without `balance` micro batches are in the order of arrival.
    `group_replicas`: replicas of an expert group, by default all.
    """
    by_mini = []
    for mini in mini_batches(len(lengths), len(set(replica_by_rank)), mini_batch_size):
        if token_budget is not None:
            by_mini.append(packed_batches(mini, lengths, token_budget, balance=balance, group_replicas=group_replicas))
            continue
        assert micro_batch_size is not None  # given if there is no budget
        if balance:
            by_mini.append(balanced_batches(mini, lengths, micro_batch_size, group_replicas))
        else:
            by_mini.append(arrival_batches(mini, micro_batch_size))
    schedule = tuple(tuple(tuple(map(tuple, mini)) for mini in minis) for minis in zip(*by_mini, strict=True))
    return BatchPlan(tuple(replica_by_rank), schedule)


def mini_batches(samples: int, replicas: int, mini_batch_size: int) -> list[list[range]]:
    """Return [mini batch][replica] -> samples, as in verl without balancing; batch_checks lets sizes divide."""
    assert samples % mini_batch_size == mini_batch_size % replicas == 0, (samples, mini_batch_size, replicas)
    whole, part = samples // replicas, mini_batch_size // replicas  # a replica's samples of the step, of a mini batch
    return [[range(r * whole + at, r * whole + at + part) for r in range(replicas)] for at in range(0, whole, part)]


def train_replicas(train: ParallelLayout) -> list[int]:
    """Return [rank] -> train DP rank."""
    return [train.coordinates(rank).dp for rank in range(train.world_size)]


def expert_group_replicas(train: ParallelLayout) -> int:
    """Return how many adjacent train replicas share an expert group; both are blocks of ranks, from rank 0 on."""
    replica = train.tp * train.cp
    return math.lcm(replica, train.etp * train.ep) // replica
