"""Test the step model: its error on the published rows, the data of its constants, and the trends of its terms."""

from dataclasses import fields, replace

import numpy as np
import pytest

from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.layout.sharding import local_parameters, static_bytes
from verl_patches.plan import calibration, step_model
from verl_patches.plan.calibration import (
    CONSTANTS,
    MEAN_PROMPT,
    PUBLISHED_ROWS,
    calibration_errors,
    earlier_true_weights,
    fitted_constants,
    likely_range,
    published_run,
    run_without_cache,
    true_weights,
)
from verl_patches.plan.step_model import (
    PHASES,
    Lengths,
    decode_s,
    driver_bytes,
    memory_s,
    network_s,
    pipeline_s,
    rollout_bytes,
    rollout_s,
    stage_elements,
    stage_s,
    step_time,
    train_bytes,
    update_s,
    verl_sync,
)
from verl_patches.plan.step_plan import Workload, step_figures

# the phases that each constant may move, and no others
MOVED_PHASES = {
    "train_efficiency": {"ref", "update"},
    "decode_layer_s": {"rollout"},
    "engine_step_s": {"rollout"},
    "driver_bytes_per_s": {"ref", "update"},
    "collective_s": {"reshard"},
    "empty_cache_s": {"offload"},
    "reward_s": {"reward"},
    "advantage_s": {"advantage"},
    "train_load": {"ref", "update"},
}


def total(run):
    return sum(step_time(run, CONSTANTS).values())


# the published rows


def test_every_row_of_random_weights_is_predicted_within_5_percent_also_those_that_fix_nothing():
    assert set(step_time(published_run(), CONSTANTS)) == set(PHASES)
    found = {row["row"]: row["error"] for row in calibration_errors()}
    assert len(found) == len(PUBLISHED_ROWS)
    found = {name: error for name, error in found.items() if not name.startswith("true weights")}
    assert max(abs(error) for error in found.values()) < 0.05
    assert sum(row.fixes is None for row in PUBLISHED_ROWS) >= 25
    assert set(MOVED_PHASES) == {field.name for field in fields(CONSTANTS)}
    wrong = replace(CONSTANTS, train_efficiency=0.25)  # the control
    assert max(abs(row["error"]) for row in calibration_errors(wrong)) > 0.1
    # published: 250.2 tokens/s of a card, 796.8 s, 3039.8 tokens of a response
    assert 8192 * (MEAN_PROMPT + 3039.8) / 128 / 796.8 == pytest.approx(250.2, rel=1e-4)


def test_the_runs_with_true_weights_have_the_published_lengths_and_sums():
    for run, rows, tokens in (
        (true_weights(), calibration.TRUE_WEIGHTS, 1576.6),
        (earlier_true_weights(), calibration.EARLIER_TRUE_WEIGHTS, 2553),
    ):
        assert run.lengths.mean_of_longest() == pytest.approx(tokens, rel=5e-4)
        assert sum(rows.values()) == pytest.approx(2 * rows["total"], abs=0.4)
    even = step_time(replace(true_weights(), expert_load=(1.0, 1.0)), CONSTANTS)
    uneven = step_time(true_weights(), CONSTANTS)
    assert even["ref"] < uneven["ref"] < calibration.TRUE_WEIGHTS["ref"]  # a row that fixes nothing comes nearer


def test_a_range_is_that_of_the_errors_of_rows_that_fix_no_constant():
    errors = {row["row"]: row["error"] for row in calibration_errors()}
    low, high = likely_range("total", 1000.0)
    assert 1000 / low - 1 == pytest.approx(
        max(error for name, error in errors.items() if name.endswith("total")), abs=1e-4
    )
    assert 1000 / high - 1 == pytest.approx(errors["true weights, 2,553 tokens: total"], abs=1e-4)
    assert likely_range("update", 1.0)[1] == pytest.approx(495.1 / 405.2, rel=1e-3)  # not the one that fixes a constant
    assert likely_range("values", 1000.0) == (low, high)  # no row of it


@pytest.mark.parametrize("constant", MOVED_PHASES)
def test_each_constant_is_fixed_by_one_row_and_moves_its_own_phases_only(constant):
    (row,) = (row for row in PUBLISHED_ROWS if row.fixes == constant)
    wrong = replace(CONSTANTS, **{constant: 1.02 * getattr(CONSTANTS, constant)})
    assert row.predict(CONSTANTS) == pytest.approx(row.quoted_s, rel=2e-4)
    assert row.predict(wrong) != pytest.approx(row.quoted_s, rel=2e-4)  # the control
    run = true_weights if constant == "train_load" else lambda constants: published_run()
    before, after = step_time(run(CONSTANTS), CONSTANTS), step_time(run(wrong), wrong)
    assert {phase for phase in PHASES if before[phase] != after[phase]} == MOVED_PHASES[constant]


def test_constants_follow_from_measured_seconds():
    other = replace(CONSTANTS, train_efficiency=0.2, engine_step_s=0.03, collective_s=1e-3)
    measured = step_time(published_run(), other)
    found = fitted_constants(published_run(), measured)
    assert found["train_efficiency"] == pytest.approx(0.2)
    assert found["engine_step_s"] == pytest.approx(0.03) and found["collective_s"] == pytest.approx(1e-3)
    figures = step_figures(published_run(), Workload(measured=found))
    assert figures["total_s"] == pytest.approx(sum(measured.values()), abs=0.1)
    assert figures["quoted_total_s"] == round(total(published_run()), 2)
    assert {"phase", "seconds", "range_s", "quoted_s"} == {*figures["phases"][0]}
    assert "quoted_total_s" not in step_figures(published_run(), Workload())
    assert fitted_constants(published_run(), {}) == {}
    assert fitted_constants(published_run(), {"rollout": 1e-9}) == {}  # no value explains it


def test_the_modelled_bytes_are_the_quoted_ones():
    """Check 50.5 GB through Ray for the update at 256 workers; 73.9 GB and about 3,100 collectives of verl's sync."""
    assert driver_bytes(run_without_cache(), 3) == pytest.approx(50.5e9, rel=0.002)
    assert driver_bytes(replace(run_without_cache(), copies=1), 3) == pytest.approx(1.6e9, rel=0.02)
    sync = verl_sync(published_run().model, published_run().train)
    assert sync.received_bytes == pytest.approx(73.9e9, rel=0.02) and sync.collectives == pytest.approx(3100, rel=0.01)


# sizes and FLOPs


@pytest.mark.parametrize(("side", "library"), [("train", "mindspeed"), ("rollout", "vllm-ascend"), ("rollout", "vllm")])
def test_elements_of_a_stage_are_those_of_the_sharding(side, library):
    run = published_run()
    layout, inventory = getattr(run, side), build_inventory(run.model)
    for stage in {0, 1, layout.pp - 1} & set(range(layout.pp)):
        dense, routed = stage_elements(run.model, layout, stage, library)
        held = local_parameters(inventory, layout, stage * layout.world_size // layout.pp, library).shards.values()
        trained = sum(shard.count for shard in held if shard.parameter.trainable)
        assert dense + routed == pytest.approx(trained, rel=1e-5)  # but for the final norm
    if side == "train":
        assert 4 * (dense + routed) == pytest.approx(static_bytes(inventory, layout, 255).grad_bytes, rel=1e-5)


# pipeline


def test_a_pipeline_has_the_textbook_bubble():
    assert (pipeline_s([1.0] * 8, 56), pipeline_s([1.0] * 8, 56, virtual=2)) == (63, 59.5)
    assert pipeline_s([1.0, 2.0, 1.0], 10) == 22  # the slowest stage decides


def test_a_second_epoch_is_a_second_update_and_no_smaller_mini_batch():
    """Check a control too: two mini batches split the batch, and add an optimizer step and a fill of the pipeline."""
    run = published_run()
    once = update_s(run, CONSTANTS)
    sent = driver_bytes(run, 3) / CONSTANTS.driver_bytes_per_s
    assert update_s(replace(run, epochs=2), CONSTANTS) == pytest.approx(2 * once - sent)
    assert update_s(replace(run, mini_batches=2), CONSTANTS) < 1.2 * once


# how the modelled seconds must change


def test_what_is_switched_off_is_slower():
    on = replace(
        published_run(), tensor_cache=True, moe_alltoall_overlap_comm=True, swap_optimizer=False, recompute_layers=0
    )
    for off in (
        {"tensor_cache": False},
        {"moe_alltoall_overlap_comm": False},
        {"swap_optimizer": True},
        {"recompute_layers": 4},
        {"old_micro_batch": 1},
    ):
        assert total(replace(on, **off)) > total(on), off


def test_gloo_costs_the_quoted_difference_at_each_of_two_calls_of_a_step():
    run = published_run()
    slower = step_time(replace(run, dp_sync="gloo"), CONSTANTS)["rollout"] - step_time(run, CONSTANTS)["rollout"]
    assert slower == pytest.approx(2 * 0.011 * 3072, rel=0.01)
    two, one = (step_time(replace(run, dp_syncs=syncs), CONSTANTS)["rollout"] for syncs in (2, 1))
    assert two == step_time(run, CONSTANTS)["rollout"] and two - one == pytest.approx(0.003 * 3072, rel=0.01)
    alone = replace(run, rollout=rollout_layout(128, 1, 2))  # nothing to sync: instances of one replica
    assert step_time(replace(alone, dp_sync="gloo"), CONSTANTS) == step_time(alone, CONSTANTS)


# rollout


def test_a_decode_step_grows_with_batch_context_and_the_padded_size():
    def at(running, context, tier):
        return decode_s(published_run(), running, context, tier, CONSTANTS)

    assert at(1, 0, 1) < at(1, 0, 64) < at(64, 0, 64) + 1e-12 < at(64, 3000, 64)
    assert at(64, 2000, 64) - at(64, 1000, 64) == pytest.approx(memory_s(64 * 1000 * 1152 * 61))  # KV of MLA
    eager = replace(published_run(), graph_sizes=())
    assert decode_s(eager, 1, 0, 1, CONSTANTS) > at(1, 0, 1)


def test_a_kv_cache_that_holds_few_responses_makes_the_rest_wait():
    run = published_run()
    token = 576 * 2 * 61
    half = replace(run, kv_bytes=32 * token * (MEAN_PROMPT + 3072))
    assert step_time(half, CONSTANTS)["rollout"] > 1.5 * step_time(run, CONSTANTS)["rollout"]
    enough = replace(run, kv_bytes=64 * token * (MEAN_PROMPT + 3072))
    assert step_time(enough, CONSTANTS)["rollout"] == pytest.approx(step_time(run, CONSTANTS)["rollout"], rel=1e-6)


def test_context_parallel_ranks_share_a_layer_and_exchange_heads():
    """Check Ulysses: 128 heads, q and k of 192, v and output of 128; half of a rank's tokens go to the other."""
    run = published_run()
    both = replace(run, train=replace(run.train, world_size=512, cp=2))
    alone, shared = (stage_s(each, 1, False, CONSTANTS) for each in (run, both))
    tokens = run.lengths.prompt + run.lengths.mean_of_longest()
    exchanged = network_s(128 / 4 * (192 + 192 + 128 + 128) * 2 * tokens / 2 / 2)
    assert shared[1] == pytest.approx(alone[1] / 2 + 7 * exchanged, rel=1e-9)
    assert shared[7] == pytest.approx(alone[7] / 2 + 7 * exchanged, rel=1e-9)  # with the logits


# the tail


TAIL_RUN = replace(
    published_run(),
    rollout=rollout_layout(2, 64, 2),
    lengths=Lengths(MEAN_PROMPT, 3072, 1000.0),
    graph_sizes=(8, 16, 32, 64),
)


def test_a_rollout_is_as_long_as_its_steps_with_drawn_lengths():
    """Check drawn lengths of each replica's 64 responses; a step costs the graph of the fullest of 64 replicas."""
    draw, sigma = np.random.default_rng(1), np.log(1 + 0.55**2) ** 0.5
    lengths = np.minimum(np.exp(np.log(1000) - sigma**2 / 2 + sigma * draw.standard_normal((64, 64))), 3072)
    fixed = CONSTANTS.engine_step_s + TAIL_RUN.dp_syncs * step_model.DP_SYNC_S["hccl"]
    seconds = 0.0
    for at in range(int(lengths.max())):
        most = int((lengths > at).sum(1).max())
        tier = next(size for size in TAIL_RUN.graph_sizes if size >= most)
        seconds += decode_s(TAIL_RUN, most, MEAN_PROMPT + at, tier, CONSTANTS) + fixed
    modelled = rollout_s(TAIL_RUN, CONSTANTS)
    prefill = rollout_s(replace(TAIL_RUN, lengths=Lengths(MEAN_PROMPT, 1)), CONSTANTS)
    assert modelled - prefill == pytest.approx(seconds, rel=0.01)


# uneven experts, traffic


def test_uneven_experts_take_longer_in_their_phases_alone_and_fit_no_published_row():
    run = published_run()
    for name, load in (("rollout", (1.0, 2.0)), ("ref", (2.0, 1.0)), ("update", (2.0, 1.0))):
        before, after = (step_time(each, CONSTANTS) for each in (run, replace(run, expert_load=load)))
        moved = {phase for phase in PHASES if before[phase] != after[phase]}
        assert moved == ({"rollout"} if name == "rollout" else {"ref", "update"})
        assert before[name] < after[name] < 2 * before[name]


def test_bytes_that_a_die_sends_follow_the_layouts():
    """Compute TP1 EP8 on 8 ranks by hand: all-to-alls of 58 layers, there and back, in each of three passes."""
    one = replace(published_run(), train=ParallelLayout(8, tp=1, ep=8, etp=1), recompute_layers=0)
    tokens = one.responses / 8 * (one.lengths.prompt + 3072)
    gradients = one.model.vocab_size * 7168  # at least: tables are in all ranks
    exchanged = 58 * 2 * 8 * 7168 * 2 * 7 / 8 * tokens
    assert train_bytes(one) > 3 * exchanged + 7 / 8 * 2 * gradients * (4 + 2)
    assert train_bytes(replace(one, ref_micro_batch=None)) == pytest.approx(train_bytes(one) - exchanged)
    assert train_bytes(replace(one, recompute_layers=61)) == pytest.approx(train_bytes(one) + exchanged)
    alone = replace(published_run(), rollout=rollout_layout(256, 1, 1, expert_parallel=False))
    assert rollout_bytes(alone) == 0 < rollout_bytes(published_run())
