"""The schedule of a step as a table: what each schedule promises, its simulation, and tables that must be refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_patches.errors import ConfigError
from verl_patches.memory.schedule import (
    MEMORY_GROUPS,
    SCHEDULE,
    VERL,
    in_sleep_mode,
    make_schedule,
    residency,
    schedule_followed,
    simulate,
    staying,
    switches_of,
)

VARIANTS = (in_sleep_mode(SCHEDULE), in_sleep_mode(SCHEDULE, copied=False))
SCHEDULES = (SCHEDULE, *VERL.values(), *VARIANTS)
SIZES = {group: 2**bit for bit, group in enumerate(MEMORY_GROUPS)}  # a sum identifies the groups
SUBSETS = st.sets(st.sampled_from(sorted(MEMORY_GROUPS)))


def moves_of_a_step(schedule, stays, groups):
    """Moves of every step but the first, of `groups` and of the allocator, such as "load actor_params"."""
    moments = simulate(schedule, dict.fromkeys(MEMORY_GROUPS, 1), stays).values()
    return [str(move) for moment in moments for move in moment.moves if not move.group or move.group in groups]


def positions(schedule, verbs, group):
    moves = [move for phase in schedule.phases for move in (*phase.enter, *phase.leave)]
    return [i for i, move in enumerate(moves) if move.verb in verbs and move.group == group]


def test_groups_on_the_device_in_each_phase_of_our_schedule():
    found = residency(SCHEDULE)
    assert list(found) == "reshard wake_kv rollout sleep reward old_log_prob ref advantage update".split()
    assert found["reshard"] == {"actor_params", "rollout_weights", "reshard_buffers"}
    assert found["wake_kv"] == found["rollout"] == {"rollout_weights", "kv_cache"}
    assert found["sleep"] == found["reward"] == {"tensor_cache"}
    assert found["old_log_prob"] == found["advantage"] == {"tensor_cache", "actor_params"}
    assert found["ref"] == {"tensor_cache", "actor_params", "ref_params"}
    assert found["update"] == {"actor_params", "grads", "optimizer", "swap_window"}


def test_the_kv_cache_is_allocated_last_and_freed_first():
    (weights,), (cache,) = (positions(SCHEDULE, ("alloc",), t) for t in ("rollout_weights", "kv_cache"))
    (weights_go,), (cache_goes,) = (positions(SCHEDULE, ("free",), t) for t in ("rollout_weights", "kv_cache"))
    assert weights < cache < cache_goes < weights_go
    assert positions(SCHEDULE, ("offload",), "actor_params") < [cache]
    worst = simulate(VERL["a3"], SIZES)["wake_kv"].at_peak  # negative control: the cache comes before they go
    assert worst >= {"kv_cache", "actor_params", "grads"}


def test_training_weights_stay_from_update_to_reshard():
    found = simulate(SCHEDULE, SIZES)
    moved = {name: (m.to_device_bytes, m.to_host_bytes) for name, m in found.items()}
    assert found["reshard"].to_device_bytes == 0 and found["reshard"].to_host_bytes == SIZES["actor_params"]
    assert moved["old_log_prob"] == (SIZES["actor_params"], 0) and moved["ref"] == (SIZES["ref_params"], 0)
    assert found["update"].to_device_bytes == found["update"].to_host_bytes == SIZES["optimizer"]
    assert sum(m.empty_cache_calls for m in found.values()) == 2


def test_a_peak_includes_groups_that_the_step_before_left():
    left = make_schedule("left", ("reshard", "alloc kv_cache, free optimizer", ""), ("update", "load optimizer", ""))
    moment = simulate(left, SIZES)["reshard"]
    assert moment.at_peak == {"kv_cache", "optimizer"} and moment.resident == {"kv_cache"}


def test_moves_of_verls_schedules():
    for schedule in VERL.values():
        found = simulate(schedule, SIZES)
        there_and_back = SIZES["actor_params"] * 3 + SIZES["ref_params"] + SIZES["optimizer"] + SIZES["rollout_weights"]
        assert sum(m.to_device_bytes for m in found.values()) == there_and_back
        assert sum(m.to_host_bytes for m in found.values()) == there_and_back
        assert sum(m.empty_cache_calls for m in found.values()) > 10


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@given(stays=SUBSETS, absent=SUBSETS)
def test_every_schedule_closes_whatever_stays_or_is_missing(schedule, stays, absent):
    sizes = {group: size for group, size in SIZES.items() if group not in absent}
    found = simulate(schedule, sizes, stays)
    for moment in found.values():
        assert moment.resident >= stays & set(sizes) and not moment.resident & absent
        assert moment.peak_bytes == sum(SIZES[t] for t in moment.at_peak)
        assert moment.peak_bytes >= sum(SIZES[t] for t in moment.resident)
        assert moment.to_device_bytes <= sum(sizes.get(t, 0) for t in MEMORY_GROUPS if t not in stays)
    if stays >= set(MEMORY_GROUPS):
        assert all(m.to_device_bytes == m.to_host_bytes == 0 for m in found.values())


def test_the_move_that_should_have_released_a_group():
    assert SCHEDULE.released_by("grads", "reshard") == "after update (free)"  # the step before
    assert SCHEDULE.released_by("actor_params", "wake_kv") == "after reshard (offload)"
    assert SCHEDULE.released_by("kv_cache", "sleep") == "at the start of sleep (free)"
    assert SCHEDULE.released_by("ref_params", "ref") == "after ref (free)"
    assert VERL["pypi"].released_by("tensor_cache", "reshard") is None


def test_moves_of_a_step_of_ours():
    training = ("actor_params", "grads", "optimizer", "ref_params")
    expected = (
        "offload actor_params, empty_cache, empty_cache, load actor_params, load ref_params, free ref_params, "
        "alloc grads, load optimizer, offload optimizer, free grads"
    )
    assert ", ".join(moves_of_a_step(SCHEDULE, (), training)) == expected
    stays = moves_of_a_step(SCHEDULE, {"actor_params", "grads"}, training)
    assert stays[:3] == ["empty_cache", "empty_cache", "load ref_params"]


def test_the_schedule_of_a_run():
    def name(rows, vllm_sleep=False, synced=True):
        switches = switches_of(rows, vllm_sleep=vllm_sleep, synced=synced)
        return schedule_followed(skip_old_log_prob=False, **switches).name

    every = {"memory.sleep_mode"}
    assert name(every) == name(every, synced=False) == "ours"
    assert name(every, vllm_sleep=True) == "ours, addresses kept by vLLM"
    assert name(every, vllm_sleep=True, synced=False) == "ours, with vLLM's sleep mode"
    assert name(()) == "ours, with vLLM's sleep mode"
    assert schedule_followed(skip_old_log_prob=True, own_sleep_mode=True).name == "ours, without old_log_prob"


def test_sleep_modes_change_copies_and_not_residency():
    assert all(residency(other) == residency(SCHEDULE) for other in VARIANTS)
    sleeps = in_sleep_mode(SCHEDULE), in_sleep_mode(SCHEDULE, copied=False)
    copied = [sum(m.to_host_bytes for m in simulate(schedule, SIZES).values()) for schedule in (*sleeps, SCHEDULE)]
    assert copied[0] - copied[1] == SIZES["rollout_weights"] and copied[1] == copied[2]
    for schedule, come in zip(sleeps, ("load rollout_weights", "alloc rollout_weights"), strict=True):
        wake = simulate(schedule, SIZES)["reshard"].moves
        assert str(wake[0]) == "empty_cache" and str(wake[1]) == come  # memory past the pool


def test_a_wrong_table_is_refused():
    with pytest.raises(ConfigError, match="a: lod grads"):
        make_schedule("x", ("a", "lod grads", ""))
    with pytest.raises(ConfigError, match="alloc gradz is no move"):
        make_schedule("x", ("a", "", "alloc gradz"))
    with pytest.raises(ConfigError, match="a holds nothing .*grads later"):
        residency(make_schedule("x", ("a", "", ""), ("b", "alloc grads", "")))
    with pytest.raises(ConfigError, match=r"has no phase 'rolout'; it has reshard"):
        SCHEDULE.phase("rolout")


def test_groups_that_a_run_never_moves():
    every = {"param_offload": True, "optimizer_offload": True, "ref_offload": True}
    assert staying(**every) == frozenset()
    assert staying(**every, one_memory=True) == {"rollout_weights"}
    assert staying(**every, one_memory=True, own_sleep_mode=True) == frozenset()
    assert staying(**every, own_sleep_mode=True, synced=False) == {"rollout_weights"}
    assert staying(**{**every, "param_offload": False}) == {"actor_params", "grads"}
    assert staying(**dict.fromkeys(every, False)) == {"actor_params", "grads", "optimizer", "ref_params"}


def drawn(text):
    """{phase: groups on the device} of docs/images/step.svg."""
    return {
        phase: frozenset(groups.split()) for phase, groups in re.findall(r'data-phase="(.*)" data-groups="(.*)"', text)
    }


def test_the_figure_of_a_step_shows_this_schedule_and_files_that_exist():
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs/images/step.svg").read_text()
    assert list(drawn(text).items()) == list(residency(SCHEDULE).items())
    assert drawn(text.replace("kv_cache rollout_weights", "kv_cache", 1)) != residency(SCHEDULE)  # the control
    files = re.findall(r"\w+/\w+\.py", text)
    assert len(files) >= 8 and [name for name in files if not (root / "verl_patches" / name).is_file()] == []
