"""Test that the proof of a plan finds errors: the plan of a small model, spoilt in one place."""

from dataclasses import replace

import pytest

from tests.reshard.test_plan import make_plan
from verl_patches.errors import RecipeError
from verl_patches.layout.parallel import rollout_layout
from verl_patches.reshard.check import check_plan
from verl_patches.reshard.region import Region

EMBEDDING = "model.embed_tokens.weight"  # rank 1 holds its second half


class Small:
    """Hold the plan, the plans of its ranks, and the first segment of several regions that rank 1 receives."""

    def __init__(self):
        self.plan = make_plan("tp2 ep4 etp1 pp2 @8 layers=1,3", rollout_layout(2, 2, 2), bucket_bytes=1 << 17)
        self.roomy = replace(self.plan, bucket_bytes=1 << 30)
        self.ranks = {rank: self.plan.for_rank(rank) for rank in range(8)}
        segments = [(n, *pair) for n, bucket in enumerate(self.ranks[1].buckets) for pair in bucket.receive.items()]
        self.number, self.sender, self.regions = next(segment for segment in segments if len(segment[2]) > 1)

    def set_local(self, rank, regions):
        self.ranks[rank] = replace(self.ranks[rank], local=tuple(regions))

    def set_segment(self, rank, side, peer, regions):
        buckets = list(self.ranks[rank].buckets)
        changed = {**getattr(buckets[self.number], side), peer: tuple(regions)}
        buckets[self.number] = buckets[self.number]._replace(**{side: {p: r for p, r in changed.items() if r}})
        self.ranks[rank] = replace(self.ranks[rank], buckets=tuple(buckets))

    def set_both(self, sender, regions):
        self.set_segment(1, "receive", sender, regions)
        self.set_segment(sender, "send", 1, regions)

    def refuses(self, message, plan=None):
        with pytest.raises(RecipeError, match=message):
            check_plan(plan or self.plan, self.ranks)


@pytest.fixture
def small():
    made = Small()
    check_plan(made.plan, made.ranks)
    return made


def test_a_region_removed_or_doubled_is_caught(small):
    name = small.regions[0].name
    small.set_both(small.sender, small.regions[1:])
    small.refuses(f"rank 1 needs .*{name}.* exactly once, found no write")
    small.set_both(small.sender, (*small.regions, small.regions[0]))
    small.refuses("bytes in bucket|found two writes")
    small.refuses(f"rank 1 needs .*{name}.* exactly once, found two writes", small.roomy)


@pytest.mark.parametrize(("change", "message"), [
    (lambda local: local[1:], "rank 0 needs .* exactly once, found no write"),
    (lambda local: [*local, next(r for r in local if r.name == EMBEDDING)._replace(stop=1)], "found two writes"),
    (lambda local: [*local, Region("lm_head.weight", 1, 0, 1)], "rank 0 keeps lm_head.weight"),
])  # fmt: skip
def test_wrong_local_regions_are_caught(small, change, message):
    small.set_local(0, change(small.ranks[0].local))
    small.refuses(message)


@pytest.mark.parametrize("rows", [-1, 1])
def test_a_local_region_that_is_not_held_is_caught(small, rows):
    local = small.ranks[1].local
    small.set_local(
        1, [r._replace(start=r.start + rows, stop=r.stop + rows) if r.name == EMBEDDING else r for r in local]
    )
    small.refuses(f"rank 1 keeps {EMBEDDING}")


def test_two_ranks_swapped_are_caught(small):
    small.ranks[2], small.ranks[3] = small.ranks[3], small.ranks[2]
    small.ranks = {rank: replace(rank_plan, rank=rank) for rank, rank_plan in small.ranks.items()}
    small.refuses("rank [23] ")


def test_a_sender_that_does_not_hold_it_is_caught(small):
    stages = small.plan.stages
    other = next(rank for rank in range(8) if stages[rank] != stages[small.sender] and rank != 1)
    small.set_both(small.sender, ())
    small.set_both(other, (*small.ranks[1].buckets[small.number].receive.get(other, ()), *small.regions))
    small.refuses(f"rank {other} sends .* found no shard of that tensor", small.roomy)


@pytest.mark.parametrize("change", ["order", "not sent", "not expected", "another bucket"])
def test_ends_that_disagree_are_caught(small, change):
    if change == "another bucket":
        buckets = small.ranks[small.sender].buckets
        later = zip(buckets, (buckets[-1], *buckets[:-1]), strict=True)
        buckets = tuple(bucket._replace(send=before.send) for bucket, before in later)
        small.ranks[small.sender] = replace(small.ranks[small.sender], buckets=buckets)
    elif change == "not expected":
        peer, regions = next(iter(small.ranks[1].buckets[small.number].send.items()))
        small.set_segment(1, "send", peer, (*regions, small.ranks[1].local[0]))
    else:
        small.set_segment(small.sender, "send", 1, small.regions[::-1] if change == "order" else ())
    small.refuses("plan: bucket .* expects|bytes in bucket")


def test_a_full_bucket_and_a_missing_one_are_caught(small):
    small.refuses("bytes in bucket 0, expected at most bucket_bytes = 4096", replace(small.plan, bucket_bytes=4096))
    small.ranks[4] = replace(small.ranks[4], buckets=small.ranks[4].buckets[:-1])
    small.refuses("rank 4 has .* buckets, expected")
