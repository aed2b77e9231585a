"""Test time bounds of phases and which rank is named, on made-up views of nodes and on gloo ranks."""

import math
from dataclasses import replace

import pytest

from verl_patches.heartbeat.heartbeat import Beat
from verl_patches.heartbeat.node import SeenProcess
from verl_patches.launch.supervise.stall import Bounds, find_awaited_ranks, find_stall, start_progress
from verl_patches.layout.phases import LOADED, START, VALIDATE

BOUNDS = Bounds(first_s=1000, least_s=60, factor=5, load_s=5000)
UPDATE, DONE = ("update_actor", "update"), {"update_actor update": 10.0}
WORLD, PAIR = "0 0-3", "7 2,3"


def rank(number, in_place_s=70.0, *, at=UPDATE, state="S", done=DONE, now=3, **more):
    """Make rank `number` at operation `now` of the group of all, in which 3 were begun before the call."""
    before, silent_s, still_s = more.pop("before", {WORLD: 3}), more.pop("silent_s", 0.5), more.pop("still_s", 0.0)
    disk_still_s = more.pop("disk_still_s", math.inf)
    beat = Beat(f"rank {number}", number, 100 + number, 1, *at, longest_s=done, groups={WORLD: now, **more})
    beat.groups_before = before
    return SeenProcess(beat, f"host{number // 2}", in_place_s, silent_s, state, still_s, disk_still_s=disk_still_s)


def controller(in_place_s, call="update_actor", step=4):
    beat = Beat("controller", None, 99, 1, call, step=step, longest_s={"reward": 2.0, "update_actor": 11.0})
    return SeenProcess(beat, "host0", in_place_s, 0.5, "S")


def named(*processes, bounds=BOUNDS):
    stall = find_stall(processes, bounds)
    return None if stall is None else [seen.beat.name for seen in stall.culprits]


def sentence(*processes):
    return find_stall(processes, BOUNDS).sentence


PROFILE, CACHED = ("update_actor", "profile"), ("update_cached", "update")
LAST_SAVE, VALIDATED = ("update_cached", "last checkpoint"), (VALIDATE, "rollout")
ROLLOUTS = {f"{VALIDATE} rollout": 500.0, "generate_sequences rollout": 10.0}


@pytest.mark.parametrize(("bound_s", "key", "at", "done"), [
    (60, "watch.least_s", UPDATE, DONE),
    (100, "watch.factor", UPDATE, {"update_actor update": 20.0}),
    (1000, "watch.first_s", UPDATE, {}),
    (5000, "timeouts.load_s", ("init_model", ""), {}),  # loading
    # a disk is waited for, each time: before there may have been nothing to write
    (5000, "timeouts.load_s", LAST_SAVE, {"update_cached last checkpoint": 0.001}),
    (5000, "timeouts.load_s", PROFILE, {"update_actor profile": 0.001}),
    (60, "watch.least_s", CACHED, {"update_cached update": 0.001}),  # control
    # the first validation is as long as loading, and rollouts take what rollouts took
    (5000, "timeouts.load_s", VALIDATED, {}),
    (2500, "watch.factor", VALIDATED, ROLLOUTS),
    (60, "watch.least_s", ("generate_sequences", "rollout"), ROLLOUTS),
])  # fmt: skip
def test_each_place_has_its_own_bound_and_the_error_names_its_key(bound_s, key, at, done):
    assert named(rank(0, bound_s - 1, at=at, done=done)) is None
    late = rank(0, bound_s + 1, at=at, done=done)
    assert named(late) == ["rank 0"] and f"at most {bound_s} s were expected (recipe.{key})" in sentence(late)


LOADING, LOADED_IT, SAVING = ("load_checkpoint", ""), ("load_checkpoint", LOADED), ("finish_checkpoint", "")


def test_a_slow_disk_is_no_stall_while_the_bytes_of_any_rank_grow():
    """Check days of loading and saving; where no byte came for too long, those that still read are named."""
    waits, day_s = rank(1, 9e4, at=LOADED_IT, disk_still_s=8e4), 9e4
    assert named(rank(0, day_s, at=LOADING, disk_still_s=4999), waits) is None
    assert named(rank(0, day_s, at=SAVING, disk_still_s=4999), rank(1, day_s, at=SAVING, disk_still_s=8e4)) is None
    stuck = rank(0, day_s, at=LOADING, disk_still_s=5001)
    assert named(stuck, waits) == ["rank 0"]
    assert "load_checkpoint for 5001 s without a byte read or written, where at most" in sentence(stuck, waits)
    assert named(rank(0, day_s, at=SAVING, disk_still_s=5001)) == ["rank 0"]
    update = rank(0, 61, disk_still_s=1)  # controls: a save beside an update, and loading that has read nothing
    assert named(update) == ["rank 0"] and "without a byte" not in sentence(update)
    assert named(rank(0, 5001, at=LOADING)) == ["rank 0"]


def test_the_longest_time_of_any_rank_counts():
    longest = {"update_actor update": 20.0}
    assert named(rank(0, 99), rank(1, 99, done=longest)) is None and named(rank(0, 101), rank(1, done=longest))
    assert named(rank(0, 61), rank(1, 61)) == ["rank 0", "rank 1"]  # the control


def test_a_start_that_hangs_names_the_ranks_that_have_no_heartbeat_or_are_still_in_it():
    start = {"at": (START, ""), "done": {}}
    begun = controller(1001, START, step=0)
    assert find_stall([rank(0, 999, **start)], BOUNDS, 2) is None
    stall = find_stall([rank(0, 1001, **start), controller(10, START, step=0)], BOUNDS, 4)
    assert (stall.culprits, [seen.beat.name for seen in stall.waiting]) == ((), ["rank 0"])
    assert "rank 0 (pid 100 on host0) is in the start for 1001 s, where at most 1000 s" in stall.sentence
    assert "ranks 1-3 of 4 have no heartbeat" in stall.sentence
    stall = find_stall([rank(0, 700, at=("", ""), done={}), rank(1, 1001, **start), begun], BOUNDS, 2)
    assert [seen.beat.name for seen in stall.culprits] == ["rank 1"] and "rank 0" not in stall.sentence
    stall = find_stall([begun, rank(0, 1001, at=("", ""), done={})], BOUNDS, 1)  # it has its workers, and hangs
    assert [seen.beat.name for seen in stall.culprits] == ["controller"] and "heartbeat" not in stall.sentence
    stopped = rank(0, 1001, **start, state="T"), rank(1, 1001, **start)
    assert "rank 0 (pid 100 on host0) is stopped" in find_stall(stopped, BOUNDS, 2).sentence


def test_how_far_a_start_is_until_the_controller_is_in_a_step():
    begun = controller(3, START, step=0)
    assert start_progress([], 2) == start_progress([begun], 2) == "0 of 2 ranks have started"
    constructing = rank(0, 3, at=(START, ""))
    assert start_progress([constructing, begun], 2) == "1 of 2 ranks have started: 1 in the worker's constructor"
    ranks = [rank(number, 3, at=("init_model", "")) for number in range(3)] + [rank(3, 3, at=("", ""))]
    assert start_progress([*ranks, begun], 4).endswith(": 3 building the models, 1 waiting")
    for number, seen in enumerate(ranks[:2]):
        seen.beat.disk_bytes = (3 - number) * 10**9
    said = start_progress([*ranks, begun], 4)
    assert said.endswith("; 5.0 GB of weights read, by rank 1 (pid 101 on host0) 2.0 GB")
    assert start_progress([*ranks, controller(0, step=1)], 4) == ""


def test_a_rank_that_others_wait_for_is_named_with_the_group():
    """Let ranks 0 and 1 begin operation 5 of the group of all while rank 3 waits in its pair for rank 2."""
    ranks = [rank(0, now=5), rank(1, now=5), rank(2, now=4, **{PAIR: 8}), rank(3, now=4, **{PAIR: 9})]
    for seen in ranks[2:]:
        seen.beat.groups_before = {WORLD: 3, PAIR: 8}
    assert named(*ranks) == ["rank 2"]
    text = sentence(*ranks, controller(71))
    assert text.startswith("step 4: rank 2 (pid 102 on host1) is behind the others, in update_actor (update) for 70 s")
    assert "at most 60 s were expected" in text and "3 other ranks" in text
    assert "operation 5 of process group 0 (ranks 0-3); rank 2 is at 4" in text
    assert find_awaited_ranks(ranks)[2].keys() == {0, 1, 3} and find_awaited_ranks(ranks)[3].keys() == {0, 1}


def test_a_rank_that_others_wait_for_too_long_is_named_before_its_phase_is_overdue():
    """Name it before HCCL ends the wait and names a waiting rank; controls: a short wait, progress, equal numbers."""
    bounds = replace(BOUNDS, least_s=2500, collective_s=800)
    behind = rank(1, 900.0, now=4, still_s=700.0)
    stall = find_stall([rank(0, 900.0, now=5, still_s=801.0), behind, rank(2, 900.0, now=5, still_s=790.0)], bounds)
    assert [seen.beat.name for seen in stall.culprits] == ["rank 1"] and stall.sentence.startswith(
        "rank 1 (pid 101 on host0) is behind the others, in update_actor (update); rank 0 (pid 100 on host0) waits in "
        "update_actor (update) for 801 s, where at most 800 s were expected "
        "(recipe.train.distributed_timeout_minutes); 2 other ranks are in a call, at operation 5 of process group 0 "
        "(ranks 0-3); rank 1 is at 4"
    )
    stopped = rank(2, 900.0, now=4, still_s=700.0, state="T")
    assert named(rank(0, 900.0, now=5, still_s=801.0), behind, stopped, bounds=bounds) == ["rank 2"]
    never_came = rank(1, 900.0, at=("", ""))
    assert named(rank(0, 900.0, now=4, still_s=801.0), never_came, bounds=bounds) == ["rank 1"]
    for still_s, now in ((799.0, 5), (0.0, 5), (801.0, 4)):
        assert named(rank(0, 900.0, now=now, still_s=still_s), behind, bounds=bounds) is None
    loads = {"at": ("init_model", ""), "still_s": 801.0}  # for a disk, perhaps of another rank
    assert named(rank(0, 900.0, now=5, **loads), rank(1, 900.0, now=4, **loads), bounds=bounds) is None


@pytest.mark.parametrize(("ranks", "names", "words"), [
    ([rank(0, now=4), rank(1, 300.0, at=("", ""), now=3)], ["rank 1"], "behind the others, in no call; rank 0 (pid"),
    ([rank(0, 65), rank(1, 2.0, at=("", ""))], ["rank 0"], "rank 0 (pid 100 on host0) is overdue"),
    ([rank(number) for number in range(3)], ["rank 0", "rank 1", "rank 2"], "are overdue"),
    ([rank(number) for number in range(40)], [f"rank {n}" for n in range(40)], "rank 7 (pid 107 on host3) and 32 more"),
])  # fmt: skip
def test_who_is_named(ranks, names, words):
    """Name a rank that never came to the call, one that is still in it, or all if all are equal; the first of many."""
    assert named(*ranks) == names and words in sentence(*ranks)


def test_groups_whose_numbers_cannot_be_compared_say_nothing():
    """Check a pipeline's stages, which send and receive unequally often, and a group that was not used yet."""
    unequal = [rank(0, now=5), rank(1, now=4, before={WORLD: 2})]
    assert find_awaited_ranks(unequal) == {} and named(*unequal) == ["rank 0", "rank 1"]
    assert find_awaited_ranks([rank(0, now=1, before={}), rank(1, now=0, before={})]) == {}
    assert find_awaited_ranks([rank(0, now=5), rank(1, now=4)]) == {1: {0: (WORLD, 4, 5)}}  # the control


@pytest.mark.parametrize(("what", "words"), [
    ({"state": "T"}, "is stopped (state T: SIGSTOP or a debugger)"),
    ({"silent_s": 40.0, "state": "D"}, "has run no Python for 40 s (state D)"),
    ({"state": "gone", "silent_s": 31.0}, "ended 31 s ago in update_actor (update), by a signal"),
])  # fmt: skip
def test_the_state_of_a_process_comes_before_what_others_wait_for(what, words):
    ranks = [rank(0, now=4), rank(1, now=5), rank(2, now=5, **what)]
    assert named(*ranks) == ["rank 2"] and words in sentence(*ranks)


def test_a_process_that_has_just_ended_is_left_to_ray():
    assert named(rank(0, 10), rank(1, 10, state="gone", silent_s=29.0)) is None


def test_the_controller_is_named_while_no_rank_is_in_a_call():
    idle = [rank(number, 70.0, at=("", "")) for number in (0, 1)]
    assert named(*idle, controller(71)) == ["controller"]
    text = sentence(*idle, controller(71))
    assert text.startswith("step 4: controller (pid 99 on host0) is in update_actor for 70 s")
    assert named(*idle, controller(71, call="")) is None  # before step 1
    assert named(rank(0, 5.0, at=("", "")), controller(500)) is None  # ranks were in a call until 5 s ago
    assert named(*idle, controller(71, call="reward"), bounds=Bounds(1000, 60, 40)) is None


@pytest.mark.slow
@pytest.mark.parametrize(("how", "by", "words"), [
    ("stopped", "place", "is stopped (state T"),
    ("busy", "place", "is behind the others, in"),
    ("busy", "wait", "rank 3 (pid "),
])  # fmt: skip
def test_of_gloo_ranks_the_one_that_hangs_is_named_with_its_stack(tmp_path, run_ranks, how, by, words):
    """Hang rank 2 by SIGSTOP or an endless loop; rank 3 waits for it in their pair.

    Ranks 0 and 1 wait too, in the group of all, whose numbers are not compared: rank 0 has sent a tensor before.
    """
    text, names, stacks, awaited = run_ranks(
        "tests.launch.supervise.gloo_ranks:one_hangs", str(tmp_path), how, by, size=4
    )[0]
    assert names == ["rank 2"] and words in text and "in update_actor (update) for" in text, (text, awaited)
    assert {rank: set(waiting) for rank, waiting in awaited.items()} == {2: {3}}
    assert ("where at most 10 s" in text) and ("waits in update_actor (update) for" in text) == (by == "wait")
    assert "in one_hangs" in stacks["rank 2"]
    assert "in all_reduce" in stacks["rank 3"] and "all_reduce" not in stacks["rank 2"]
