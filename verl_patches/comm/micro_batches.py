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
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from verl_patches.errors import ConfigError

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
