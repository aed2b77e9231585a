"""Micro batches that are equally long on all data-parallel replicas, chosen from lengths alone.

All replicas of a step share one expert group, so the n-th micro batches take as long as the longest of them: an update
costs the sum over micro batches of the most tokens on any replica. Samples sorted by length are cut into slots of one
sample a replica. For micro batches of one sample nothing costs less: over D replicas the k*D+1 longest samples fill at
least k+1 slots, so the (k+1)-th longest slot has at least the length of the (k*D+1)-th longest sample, and here it has
no more. Within a slot, the longest goes to the replica with the fewest tokens so far. The longest micro batches come
first: too little memory shows at once.

Gradients. verl's Megatron actor gives every micro batch its own aggregated loss, and Megatron divides by their number
(verl/workers/actor/megatron_actor.py loss_func; megatron/core/pipeline_parallel/schedules.py forward_step), so a
sample's weight depends at most on who shares its micro batch: `weight_depends_on_company`. Where it does, the micro
batches that arrival order makes move whole. With a token budget the weight always depends on the packing, verl's own
too; there is no arrival order to be equal to.

Where each sample of a step goes between rollout and update: plain data, equal on every rank that has the lengths.

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
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout

Samples = Sequence[int]
Replicas = list[list[list[int]]]  # [replica][micro batch] -> samples


def weight_depends_on_company(loss_agg_mode: str, micro_batch_size: int) -> bool:
    """Whether a sample weighs more or less with what shares its micro batch (verl's agg_loss modes)."""
    return micro_batch_size > 1 and loss_agg_mode == "token-mean"


def arrival(share: Sequence[Samples], micro_batch_size: int) -> Replicas:
    """Micro batches as verl cuts them: `share` has the samples of one mini batch by replica, in their order."""
    size = micro_batch_size
    uneven = {len(mine) for mine in share}
    if len(uneven) != 1 or uneven.pop() % size:
        raise ConfigError(
            f"micro batches: replicas have {sorted(map(len, share))} samples of a mini batch; expected equally many "
            f"on each, in multiples of the micro batch size {size}; change ppo_mini_batch_size x rollout.n"
        )
    return [[list(mine[at : at + size]) for at in range(0, len(mine), size)] for mine in share]


def balanced(
    share: Sequence[Samples], lengths: Sequence[int], micro_batch_size: int, *, move_whole: bool = False
) -> Replicas:
    """Micro batches of `micro_batch_size` samples, equally long on all replicas; ConfigError if they do not fit.

    `lengths`: tokens of each sample, by sample. `move_whole` keeps the micro batches of arrival order together.
    """
    in_order = arrival(share, micro_batch_size)
    units = [unit for mine in in_order for unit in mine]
    together = 1
    if not move_whole:
        units, together = [[sample] for unit in units for sample in unit], micro_batch_size
    dealt = _deal(units, lengths, len(share))
    return [[sum(mine[at : at + together], []) for at in range(0, len(mine), together)] for mine in dealt]


def packed(share: Sequence[Samples], lengths: Sequence[int], token_budget: int, *, balance: bool = True) -> Replicas:
    """Micro batches of any number of samples and at most `token_budget` tokens, equally many on each replica.

    Balanced, a slot's place is decided once for all replicas, by its longest sample; else each replica packs its own
    share, which comes out as equal where the shares are. Raises ConfigError for a sample longer than the budget, or
    replicas with unequally many samples.
    """
    arrival(share, 1)  # refuses replicas with unequally many
    longest = max((lengths[sample] for mine in share for sample in mine), default=0)
    if longest > token_budget:
        raise ConfigError(
            f"micro batches: a sample has {longest} tokens, more than the budget of {token_budget} a micro batch; "
            "raise that max_token_len_per_gpu to data.max_prompt_length + data.max_response_length or more"
        )
    if balance:
        dealt = _deal([[sample] for mine in share for sample in mine], lengths, len(share))
        mine = [[unit[0] for unit in units] for units in dealt]
        slots = [max(lengths[sample] for sample in slot) for slot in zip(*mine, strict=True)]
        bins = _equally_many([slots], token_budget) * len(share)
    else:
        mine = [list(samples) for samples in share]
        bins = _equally_many([[lengths[sample] for sample in samples] for samples in mine], token_budget)
    return [[[samples[at] for at in each] for each in places] for samples, places in zip(mine, bins, strict=True)]


def steps_cost(replicas: Replicas, lengths: Sequence[int]) -> tuple[int, float]:
    """(tokens of the longest micro batch of each step, summed; what that would be if all replicas were equal)."""
    tokens = [[sum(lengths[sample] for sample in batch) for batch in mine] for mine in replicas]
    return sum(map(max, zip(*tokens, strict=True))), sum(map(sum, tokens)) / len(replicas)


def _deal(units: Sequence[list[int]], lengths: Sequence[int], replicas: int) -> list[list[list[int]]]:
    """Units by replica, longest first; equally many to each."""
    tokens = [sum(lengths[sample] for sample in unit) for unit in units]
    order = sorted(range(len(units)), key=lambda at: (-tokens[at], at))
    dealt: list[list[list[int]]] = [[] for _ in range(replicas)]
    totals = [0] * replicas
    for begin in range(0, len(order), replicas):
        by_load = sorted(range(replicas), key=lambda replica: (totals[replica], replica))
        for replica, at in zip(by_load, order[begin : begin + replicas], strict=True):
            dealt[replica].append(units[at])
            totals[replica] += tokens[at]
    return dealt


def _equally_many(costs: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
    """For each list of costs, bins of places that hold `budget` at most: as many bins for each list, as few as found.

    The costliest goes first to the emptiest bin; bins come out costliest first, and one more is tried until all fit.
    """
    fewest = max(-(-sum(mine) // budget) for mine in costs)
    for count in range(max(fewest, 1), max(map(len, costs)) + 1):
        bins = [_spread(mine, count) for mine in costs]
        fullest = max(sum(mine[at] for at in found[0]) for mine, found in zip(costs, bins, strict=True))
        if fullest <= budget:
            return bins
    raise AssertionError("one cost a bin always fits")


def _spread(costs: Sequence[int], count: int) -> list[list[int]]:
    emptiest = [(0, 0, number) for number in range(count)]  # tokens, then how many: no bin stays without any
    bins: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        total, held, number = heapq.heappop(emptiest)
        bins[number].append(at)
        heapq.heappush(emptiest, (total + costs[at], held + 1, number))
    return sorted(bins, key=lambda each: -sum(costs[at] for at in each))


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
        costs = [
            steps_cost([list(map(list, mini)) for mini in minis], lengths) for minis in zip(*self.schedule, strict=True)
        ]
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
            made = packed(share, lengths, token_budget, balance=balance)
        elif balance:
            whole = weight_depends_on_company(loss_agg_mode, micro_batch_size)
            made = balanced(share, lengths, micro_batch_size, move_whole=whole)
        else:
            made = arrival(share, micro_batch_size)
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
        raise ConfigError(
            f"batch plan: expected samples 0..{samples - 1}, each on a rank; found {len(wrong)} held by "
            f"none or unknown, the first is {wrong[0]}"
        )
    twice = [rank for rank, mine in enumerate(held) if len(set(mine)) != len(mine)]
    if twice:
        raise ConfigError(f"batch plan: rank {twice[0]} holds a sample twice: {list(held[twice[0]])}")
    numbers = set(replica_of)
    if numbers != set(range(len(numbers))):
        raise ConfigError(f"batch plan: train replicas are {sorted(numbers)}; expected 0..{len(numbers) - 1}")
    return len(numbers)
