"""How far from equal the micro batches of the train replicas are, at the batch of the 256-die run. Run by hand:

    python tests/benchmarks/microbatch.py [--prompts 512] [--seeds 3]

Prints JSON: a list of figures, each with `value`, `bound` (what it must not exceed; null where it is reported only) and
`peer` (other ways on the same lengths, in the same run). Exits 1 where a bound is exceeded. `prompts` x 16 responses,
prompt <= 1024 and response <= 3072 tokens, lengths lognormal (tests/step/batches/lengths.py); figures are the worst of
`seeds` draws. A value is sum(max over replicas) / sum(mean over replicas) of the tokens of each micro batch; where
expert groups have 8 of 64 replicas, the maximum is over these 8, and of the 8 groups the highest sum counts.

Peers: verl's arrival order; verl's trainer.balance_batch (partitions of equal size and near-equal sum, one a worker of
256, joined in order); under a token budget, verl's rearrange_micro_batches on each replica. Partitions are made by
verl's own get_seqlen_balanced_partitions (verl.utils.seqlen_balancing of the installed verl); what verl does around it
is written here after RayPPOTrainer._balance_batch and rearrange_micro_batches of 0.4.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from report import figure, parser_of, print_report
from tqdm import tqdm
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from tests.step.batches.lengths import lognormal_lengths
from verl_patches.step.batches.batch_plan import Replicas, arrival, balanced, mini_batches, packed, steps_cost

WORLD, BUDGET = 256, 8192
CVS = (0.4, 0.55, 0.7)
BOUNDS = {(8, 8): 1.005, (64, 8): 1.005, (64, 64): 1.02}  # (replicas, of an expert group); the last is the optimum
Share = Sequence[Sequence[int]]
Ways = dict[str, Callable[[Share, Sequence[int], int], Replicas]]
SINGLE = {
    "ours": lambda share, lengths, sharing: balanced(share, lengths, 1, sharing),
    "verl arrival order": lambda share, *_: arrival(share, 1),
    "verl balance_batch": lambda share, lengths, _: arrival(verl_share(lengths, len(share)), 1),
}
BY_BUDGET = {
    "ours": lambda share, lengths, sharing: packed(share, lengths, BUDGET, sharing=sharing),
    "verl dynamic batch": lambda share, lengths, _: verl_packed(share, lengths),
    "verl dynamic batch, balance_batch": lambda share, lengths, _: verl_packed(
        verl_share(lengths, len(share)), lengths
    ),
}


def verl_share(lengths: Sequence[int], replicas: int) -> list[list[int]]:
    """What each replica gets from RayPPOTrainer._balance_batch."""
    parts = get_seqlen_balanced_partitions(list(lengths), k_partitions=WORLD, equal_size=True)
    order = [sample for part in parts for sample in part]
    each = len(order) // replicas
    return [order[r * each : (r + 1) * each] for r in range(replicas)]


def verl_packed(share: Share, lengths: Sequence[int]) -> Replicas:
    """What rearrange_micro_batches makes on each replica: as many on each, their number agreed by the most needed."""
    local = [[lengths[sample] for sample in samples] for samples in share]
    count = max(min(len(samples), -(-sum(samples) // BUDGET)) for samples in local)
    parts = [get_seqlen_balanced_partitions(samples, count, equal_size=False) for samples in local]
    return [[[samples[at] for at in part] for part in of] for samples, of in zip(share, parts, strict=True)]


def worst(ways: Ways, cv: float, replicas: int, sharing: int, samples: int, seeds: int) -> dict[str, float]:
    """{way: worst ratio over seeds}."""
    ratios = dict.fromkeys(ways, 0.0)
    for seed in range(1, seeds + 1):
        lengths = lognormal_lengths(samples, cv, seed=seed)
        (share,) = mini_batches(samples, replicas, samples)
        for name, way in ways.items():
            most, equal = steps_cost(way(share, lengths, sharing), lengths, sharing)
            ratios[name] = max(ratios[name], round(most / equal, 4))
    return ratios


def figures(samples: int, seeds: int) -> Iterator[dict[str, Any]]:
    """All of them, in minutes."""
    cases = [
        (f"micro batch 1, DP {dp}, expert groups of {sharing}, cv {cv}", bound, SINGLE, cv, dp, sharing)
        for (dp, sharing), bound in BOUNDS.items()
        for cv in CVS
    ]
    cases += [(f"{BUDGET} tokens, DP 8, cv {cv}", 1.005, BY_BUDGET, cv, 8, 8) for cv in CVS]
    for name, bound, *case in tqdm(cases, desc="microbatch", unit="figure"):
        ratios = worst(*case, samples, seeds)
        yield figure(name, ratios.pop("ours"), "", bound, ratios)


if __name__ == "__main__":
    given = parser_of(__doc__, prompts=512, seeds=3).parse_args()
    sys.exit(print_report("microbatch", figures(given.prompts * 16, given.seeds)))
