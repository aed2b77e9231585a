"""Test the schedule of a step as a table: each schedule's promises, its simulation, and tables that must be refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.runs import tiny
from verl_patches.memory.schedule import (
    CRITIC,
    LOAD_VERBS,
    MEMORY_GROUPS,
    RELEASE_VERBS,
    SCHEDULE,
    VERL_SCHEDULES,
    _simulate_step,
    make_schedule,
    residency,
    schedule_for_run,
    simulate,
    vllm_sleep_schedule,
)
from verl_patches.recipe import Recipe, Train, WeightSync

COPYING = vllm_sleep_schedule()
SCHEDULES = (SCHEDULE, *VERL_SCHEDULES.values(), COPYING)
SCHEDULES += tuple(schedule.with_rare_phase("old_log_prob") for schedule in SCHEDULES)
SCHEDULES += tuple(schedule.with_critic() for schedule in SCHEDULES)
SCHEDULES += tuple(schedule.with_reward_models() for schedule in SCHEDULES)
SIZES = {group: 2**bit for bit, group in enumerate(MEMORY_GROUPS)}  # a sum identifies the groups
SUBSETS = st.sets(st.sampled_from(sorted(MEMORY_GROUPS)))


def step_moves(schedule, unmoved_groups, groups):
    """Return the moves after the first step of `groups` and the allocator, such as "load actor_params"."""
    moments = simulate(schedule, dict.fromkeys(MEMORY_GROUPS, 1), unmoved_groups).values()
    return [str(move) for moment in moments for move in moment.moves if not move.group or move.group in groups]


def test_groups_on_the_device_in_each_phase_of_our_schedule():
    found = residency(SCHEDULE)
    assert list(found) == "reshard wake_kv rollout sleep reward old_log_prob ref advantage update".split()
    assert found["reshard"] == {"actor_params", "rollout_weights", "reshard_buffers"}
    assert found["wake_kv"] == found["rollout"] == {"rollout_weights", "kv_cache"}
    assert found["sleep"] == found["reward"] == {"tensor_cache"}
    assert found["old_log_prob"] == found["advantage"] == {"tensor_cache", "actor_params"}
    assert found["ref"] == {"tensor_cache", "actor_params", "ref_params"}
    assert found["update"] == {"actor_params", "grads", "optimizer", "swap_window"}


def test_a_reward_model_is_there_while_it_scores_and_changes_no_other_phase():
    for plain in SCHEDULES[: len(SCHEDULES) // 2]:
        found, before = residency(plain.with_reward_models()), residency(plain)
        assert found.pop("rm_scores") == before["reward"] | {"reward_params"} and found == before
    names = list(residency(SCHEDULE.with_reward_models()))
    assert names.index("rm_scores") + 1 == names.index("reward")


def test_a_critic_takes_the_actors_place_between_the_reference_and_its_update():
    plain, found = residency(SCHEDULE), residency(SCHEDULE.with_critic())
    names = "reshard wake_kv rollout sleep reward old_log_prob ref values advantage update_critic update"
    assert list(found) == names.split()
    assert found["values"] == found["advantage"] == {"tensor_cache", "critic_params"}
    assert found["update_critic"] == {"tensor_cache", *CRITIC}
    assert {name: groups for name, groups in found.items() if name in plain and name != "advantage"} == {
        name: groups for name, groups in plain.items() if name != "advantage"
    }
    stay = residency(SCHEDULE.with_critic(), {"actor_params", "grads", *CRITIC[:3]})
    assert all(groups >= {"actor_params", "critic_params", "critic_optimizer"} for groups in stay.values())


def test_a_peak_includes_groups_that_the_step_before_left():
    left = make_schedule("left", ("reshard", "alloc kv_cache, free optimizer", ""), ("update", "load optimizer", ""))
    moment = simulate(left, SIZES)["reshard"]
    assert moment.at_peak == {"kv_cache", "optimizer"} and moment.resident == {"kv_cache"}


def test_moves_of_verls_schedules():
    there_and_back = SIZES["actor_params"] * 3 + SIZES["ref_params"] + SIZES["optimizer"] + SIZES["rollout_weights"]
    for schedule in VERL_SCHEDULES.values():
        found = simulate(schedule, SIZES).values()
        assert sum(m.to_device_bytes for m in found) == sum(m.to_host_bytes for m in found) == there_and_back
        assert sum(m.empty_cache_calls for m in found) > 10


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@given(unmoved_groups=SUBSETS, absent=SUBSETS)
def test_every_schedule_closes_whatever_stays_or_is_missing(schedule, unmoved_groups, absent):
    for move in (move for phase in schedule.phases for move in (*phase.enter, *phase.leave)):
        assert move.verb in LOAD_VERBS + RELEASE_VERBS and move.group in MEMORY_GROUPS or str(move) == "empty_cache"
    sizes = {group: size for group, size in SIZES.items() if group not in absent}
    found = simulate(schedule, sizes, unmoved_groups)
    for moment in found.values():
        assert moment.resident >= unmoved_groups & set(sizes) and not moment.resident & absent
        assert moment.peak_bytes == sum(SIZES[t] for t in moment.at_peak)
        assert moment.peak_bytes >= sum(SIZES[t] for t in moment.resident)
        assert moment.to_device_bytes <= sum(sizes.get(t, 0) for t in MEMORY_GROUPS if t not in unmoved_groups)
    assert two_step_residents(schedule, unmoved_groups) == 2 * [residency(schedule, unmoved_groups)]
    # a phase of some steps leaves nothing behind
    usual = simulate(schedule, dict.fromkeys(MEMORY_GROUPS, 1), unmoved_groups)
    assert {name: residency(schedule, unmoved_groups)[name] for name in usual} == {
        n: m.resident for n, m in usual.items()
    }


def two_step_residents(schedule, unmoved_groups=()):
    """Return [{phase: groups on the device during its work}] of the first step and the second."""
    moving, now = (
        dict.fromkeys(groups, 1) for groups in (set(MEMORY_GROUPS).difference(unmoved_groups), unmoved_groups)
    )
    steps = [_simulate_step(schedule.phases, moving, now) for _ in range(2)]
    return [{name: moment.resident for name, moment in step.items()} for step in steps]


def test_a_table_that_does_not_close_is_found():
    """Check as a negative control a table whose second step begins with gradients."""
    first, second = two_step_residents(make_schedule("x", ("a", "", ""), ("b", "alloc grads", "")))
    assert first["a"] == frozenset() and second["a"] == {"grads"}


def schedule_facts(rows, synced=True, skip=False, unified_memory=False, **offload):
    """Return a run's schedule name and the groups that stay; `offload` has param_, optimizer_ or ref_offload."""
    actor = {name: offload.get(name, True) for name in ("param_offload", "optimizer_offload")}
    ref = {"param_offload": offload.get("ref_offload", True)}
    section = {"actor": {"megatron": actor}, "ref": {"megatron": ref}, "rollout": {}}
    recipe = Recipe(train=Train(skip_old_log_prob=skip), line="a3", weight_sync=WeightSync(synced))
    run = replace(tiny(), recipe=recipe, rows=frozenset(rows.split()))
    schedule, unmoved_groups = schedule_for_run(run, OmegaConf.create(section), unified_memory=unified_memory)
    return schedule.name, unmoved_groups


OUR_ROWS = "memory.order memory.sleep_mode reshard.direct"


def test_the_schedule_of_a_run_and_the_groups_that_it_never_moves():
    kept = {"rollout_weights"}
    assert schedule_facts(OUR_ROWS) == ("ours", set())
    assert schedule_facts(OUR_ROWS, synced=False) == ("ours", kept)
    assert schedule_facts("memory.order memory.sleep_mode") == ("ours", kept)  # verl's own sync proves nothing
    assert schedule_facts("memory.order reshard.direct") == ("ours, with vLLM's sleep mode", set())
    assert schedule_facts("memory.order", unified_memory=True) == ("ours, with vLLM's sleep mode", kept)
    assert schedule_facts(OUR_ROWS, unified_memory=True) == ("ours", set())
    assert schedule_facts(OUR_ROWS, skip=True)[0] == "ours, without old_log_prob"
    assert schedule_facts("memory.sleep_mode", skip=True)[0] == "verl 54c9b736, without old_log_prob"
    assert schedule_facts(OUR_ROWS, param_offload=False)[1] == {"actor_params", "grads"}
    assert schedule_facts(OUR_ROWS, optimizer_offload=False, ref_offload=False)[1] == {"optimizer", "ref_params"}


def test_vllms_sleep_mode_changes_copies_and_not_residency():
    assert residency(COPYING) == residency(SCHEDULE)
    copied, plain = (sum(m.to_host_bytes for m in simulate(each, SIZES).values()) for each in (COPYING, SCHEDULE))
    assert copied - plain == SIZES["rollout_weights"]
    wake = simulate(COPYING, SIZES)["reshard"].moves
    assert [str(move) for move in wake[:2]] == ["empty_cache", "load rollout_weights"]  # it allocates outside the pool
