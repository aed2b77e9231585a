"""What the proof of a plan must catch: the plan of a small model, spoilt in one place."""

import dataclasses

import pytest

from tests.reshard.test_plan import plan_of
from verl_patches.errors import RecipeError
from verl_patches.layout.parallel import rollout_layout
from verl_patches.reshard.check import check_plan
from verl_patches.reshard.region import Region


@pytest.fixture
def small():
    plan = plan_of("tp2 ep4 etp1 pp2 @8 layers=1,3", rollout_layout(2, 2, 2), bucket_bytes=1 << 17)
    plans = {rank: plan.for_rank(rank) for rank in range(8)}
    check_plan(plan, plans)
    return plan, plans


def _first_receive(plans, rank):
    """(bucket number, peer, regions) of the first segment of several regions that `rank` receives."""
    for number, bucket in enumerate(plans[rank].buckets):
        for peer, regions in bucket.receive.items():
            if len(regions) > 1:
                return number, peer, regions
    raise AssertionError("no segment")


def _set(plans, rank, number, side, peer, regions):
    buckets = list(plans[rank].buckets)
    changed = {**getattr(buckets[number], side), peer: regions}
    buckets[number] = buckets[number]._replace(**{side: {p: r for p, r in changed.items() if r}})
    plans[rank] = dataclasses.replace(plans[rank], buckets=tuple(buckets))


def _set_both(plans, receiver, number, sender, regions):
    _set(plans, receiver, number, "receive", sender, regions)
    _set(plans, sender, number, "send", receiver, regions)


def test_a_region_removed_is_caught(small):
    plan, plans = small
    number, sender, regions = _first_receive(plans, 1)
    _set_both(plans, 1, number, sender, regions[1:])
    with pytest.raises(RecipeError, match=f"rank 1 needs .*{regions[0].name}.* exactly once, found"):
        check_plan(plan, plans)


def test_a_local_region_removed_is_caught(small):
    plan, plans = small
    gone = plans[0].local[0]
    plans[0] = dataclasses.replace(plans[0], local=plans[0].local[1:])
    with pytest.raises(RecipeError, match=f"rank 0 needs .*{gone.name}.* exactly once, found"):
        check_plan(plan, plans)


@pytest.mark.parametrize("rows", [-1, 1])
def test_a_local_region_that_is_not_held_is_caught(small, rows):
    plan, plans = small
    name = "model.embed_tokens.weight"  # rank 1 holds its second half
    moved = tuple(r._replace(start=r.start + rows, stop=r.stop + rows) if r.name == name else r for r in plans[1].local)
    plans[1] = dataclasses.replace(plans[1], local=moved)
    with pytest.raises(RecipeError, match=f"rank 1 keeps {name}"):
        check_plan(plan, plans)


def test_a_region_duplicated_is_caught(small):
    plan, plans = small
    number, sender, regions = _first_receive(plans, 1)
    _set_both(plans, 1, number, sender, (*regions, regions[0]))
    with pytest.raises(RecipeError, match="bytes in bucket|found twice"):
        check_plan(plan, plans)
    roomy = dataclasses.replace(plan, bucket_bytes=1 << 30)
    with pytest.raises(RecipeError, match=f"rank 1 needs .*{regions[0].name}.* exactly once, found twice"):
        check_plan(roomy, plans)


def test_two_ranks_swapped_are_caught(small):
    plan, plans = small
    swapped = {**plans, 2: dataclasses.replace(plans[3], rank=2), 3: dataclasses.replace(plans[2], rank=3)}
    with pytest.raises(RecipeError, match="rank [23] "):
        check_plan(plan, swapped)
    with pytest.raises(RecipeError, match="rank 2 was given the plan of rank 3"):
        check_plan(plan, {**plans, 2: plans[3], 3: plans[2]})


def test_a_sender_that_does_not_hold_it_is_caught(small):
    plan, plans = small
    number, sender, regions = _first_receive(plans, 1)
    other = next(r for r in range(8) if plan.stages[r] != plan.stages[sender] and r != 1)
    _set_both(plans, 1, number, sender, ())
    there = plans[1].buckets[number].receive.get(other, ())
    _set_both(plans, 1, number, other, (*there, *regions))
    roomy = dataclasses.replace(plan, bucket_bytes=1 << 30)
    with pytest.raises(RecipeError, match=f"rank {other} sends .* found nothing of that tensor"):
        check_plan(roomy, plans)


@pytest.mark.parametrize("spoil", ["order", "not sent", "not awaited", "another bucket"])
def test_ends_that_disagree_are_caught(small, spoil):
    plan, plans = small
    number, sender, regions = _first_receive(plans, 1)
    if spoil == "order":
        _set(plans, sender, number, "send", 1, regions[::-1])
    elif spoil == "not sent":
        _set(plans, sender, number, "send", 1, ())
    elif spoil == "another bucket":
        buckets = plans[sender].buckets
        later = tuple(b._replace(send=before.send) for b, before in zip(buckets, (buckets[-1], *buckets), strict=False))
        plans[sender] = dataclasses.replace(plans[sender], buckets=later)
    else:
        peer = next(p for p in plans[1].buckets[number].send)
        _set(plans, 1, number, "send", peer, (*plans[1].buckets[number].send[peer], plans[1].local[0]))
    with pytest.raises(RecipeError, match="in bucket|bytes in bucket"):
        check_plan(plan, plans)


def test_a_full_bucket_and_a_missing_one_are_caught(small):
    plan, plans = small
    with pytest.raises(RecipeError, match=r"bytes in bucket 0, expected at most bucket_bytes = 4096"):
        check_plan(dataclasses.replace(plan, bucket_bytes=4096), plans)
    plans[4] = dataclasses.replace(plans[4], buckets=plans[4].buckets[:-1])
    with pytest.raises(RecipeError, match="rank 4 has .* buckets, expected"):
        check_plan(plan, plans)
    with pytest.raises(RecipeError, match="a plan for each of 8 ranks, found 1"):
        check_plan(plan, {0: plans[0]})


def test_what_nobody_asked_for_is_caught(small):
    plan, plans = small
    extra = next(r for r in plans[0].local if r.name == "model.embed_tokens.weight")
    stranger = Region("model.layers.0.self_attn.o_proj.weight", 1, 0, 1)
    plans[0] = dataclasses.replace(plans[0], local=(*plans[0].local, extra._replace(stop=extra.start + 1)))
    with pytest.raises(RecipeError, match="found twice"):
        check_plan(plan, plans)
    plans[0] = dataclasses.replace(plans[0], local=(*plans[0].local[:-1], stranger._replace(name="lm_head.weight")))
    with pytest.raises(RecipeError, match="rank 0 keeps lm_head.weight"):
        check_plan(plan, plans)
