"""Test the record of one step, its row in the table, and its rates, by hand from metrics and reports."""

import json
import math
from pathlib import Path

import pytest

from tests.runs import composed
from verl_patches.layout.flops import batch_forward_flops
from verl_patches.layout.inventory import read_model_shape
from verl_patches.run.resolve import changed_run
from verl_patches.trainer import step_record
from verl_patches.trainer.step_record import NARROW_COLUMNS, WIDE_COLUMNS, Rates, table_header, table_row

TINY = Path(__file__).resolve().parents[2] / "configs/model/deepseekv3_tiny.json"
LENGTHS, TOKENS = [10, 30, 20, 20], {"total": 80, "responses": 60}
SECONDS = {"rollout": 2.0, "log_prob": 1.0, "ref": 1.0, "update": 4.0, "step": 10.0}


@pytest.fixture(scope="module")
def run():
    batch = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    return changed_run(composed("deepseekv3_tiny_cpu", batch), {"recipe.platform": "npu"})


def test_rates_are_model_flops_over_seconds_ranks_and_the_peak(run):
    forward = batch_forward_flops(read_model_shape(TINY), LENGTHS)
    rates = Rates(run, ref=True).step_rates(LENGTHS, TOKENS, SECONDS)
    assert (rates["tokens_per_s_per_rank"], rates["generated_per_s_per_rank"]) == (4.0, 15.0)
    tflops = {"rollout": forward / 2, "ref": forward, "update": 3 * forward / 4, "step": 5 * forward / 10}
    assert rates["tflops_per_s_per_rank"] == pytest.approx({phase: rate / 2 / 1e12 for phase, rate in tflops.items()})
    assert rates["mfu"] == pytest.approx(
        {phase: rate / 353.9 for phase, rate in rates["tflops_per_s_per_rank"].items()}
    )
    assert step_record._rates_by_name(rates)["recipe/mfu/update"] == rates["mfu"]["update"]
    json.dumps(rates)


def test_a_pass_for_old_log_probs_counts_only_where_the_update_needs_it(run):
    def share(run):
        return Rates(run, ref=False).step_rates(LENGTHS, TOKENS, SECONDS)["mfu"]

    on_policy, two_batches = share(run), changed_run(run, {"actor_rollout_ref.actor.ppo_mini_batch_size": 4})
    assert share(two_batches)["step"] / on_policy["step"] == pytest.approx(5 / 4) and "log_prob" not in on_policy
    replayed = share(changed_run(two_batches, {"recipe.rollout.replay": "a run"}))
    assert replayed["step"] == on_policy["step"] and "rollout" not in replayed


def test_a_critic_has_columns_and_passes_where_a_run_has_one(run):
    forward = batch_forward_flops(read_model_shape(TINY), LENGTHS)
    metrics = {f"critic/{name}": value for name, value in {"vf_loss": 0.5, "grad_norm": math.nan}.items()}
    metrics["critic/vf_explained_var"] = -0.25
    record = {"loss": 0.5, "grad_norm": None, "explained_var": -0.25}
    assert step_record.critic_figures(metrics) == record and step_record.critic_figures({}) is None
    cells = step_record._table_cells({**whole_step(), "critic": record, "seconds": {"update_critic": 2.0}})
    assert [cells[name] for name in step_record.CRITIC_COLUMNS] == ["0.50000", "-", "-0.25000"]
    assert cells["update_critic s"] == "2.000" and not {*WIDE_COLUMNS} & {*step_record.CRITIC_COLUMNS}
    with_critic = changed_run(run, {"algorithm.adv_estimator": "gae"})
    rates = Rates(with_critic, ref=False).step_rates(LENGTHS, TOKENS, {**SECONDS, "values": 1.0, "update_critic": 3.0})
    of_critic = {phase: rates["tflops_per_s_per_rank"][phase] for phase in ("values", "update_critic")}
    assert of_critic == pytest.approx({"values": forward / 2e12, "update_critic": forward / 2e12})


def test_the_peak_is_the_platforms_or_the_users_and_a_cpu_has_none(run):
    def rates(**changes):
        changes = {f"recipe.{key.replace('__', '.')}": value for key, value in changes.items()}
        return Rates(changed_run(run, changes), ref=True).step_rates(LENGTHS, TOKENS, SECONDS)

    assert rates(profile__peak_tflops=2 * 353.9)["mfu"]["step"] == pytest.approx(rates()["mfu"]["step"] / 2)
    of_cpu = rates(platform="cpu")
    assert of_cpu["mfu"] is None and of_cpu["tflops_per_s_per_rank"]["step"] > 0
    assert Rates(run, ref=True).step_rates(None, TOKENS, SECONDS) is None  # a step without an update


def whole_step(number=3):
    sync = {"received_bytes": {"max": 25_400_000_000}, "collectives": 65, "peak_extra_bytes": 2_147_483_648}
    step = {"step": 3, "reward": 0.5, "grad_norm": 1.0, "seconds": {}, "logprob_delta": {"mean": 5e-7, "max": 1e-6}}
    return step | {
        "sync": sync,
        "memory": {"peak_bytes": 54_990_000_000},
        "dispatch": {"put_bytes": 107_000_000_000},
        "skipped": None,
        "preempted": 7,
    }


def test_the_narrow_table_fits_a_terminal_and_the_wide_one_has_every_figure_under_its_name():
    step = whole_step() | {"seconds": {"rollout": 1.5, "update": 2.5, "step": 4.5, "offload": 0.25}}
    nothing = {"sync": None, "memory": None, "dispatch": None, "logprob_delta": None, "grad_norm": None}
    for columns, missing in ((NARROW_COLUMNS, 3), (WIDE_COLUMNS, 11)):  # phases without seconds too
        empty = table_row({**step, **nothing}, columns)
        assert len(table_row(step, columns)) == len(table_header(columns)) == len(empty)
        assert empty.split().count("-") == missing
    assert len(table_header(NARROW_COLUMNS)) <= 80 and set(NARROW_COLUMNS) < set(WIDE_COLUMNS)
    last = "1.500 2.500 4.500 54990.000"
    assert table_row(step, NARROW_COLUMNS).split() == ["3", "0.5000", "1.00000", "5.00e-07", *last.split()]
    assert table_header(NARROW_COLUMNS).split()[:4] == ["step", "reward", "grad_norm", "|dlogp|"]
    texts = dict(zip(WIDE_COLUMNS, table_row(step, WIDE_COLUMNS).split()[4:], strict=True))
    assert (texts["offload s"], texts["held MB"], texts["sync calls"]) == ("0.250", "54990.000", "65")
    assert (texts["sync MB"], texts["extra MB"]) == ("25400.000", "2147.484")
    assert (texts["sent MB"], texts["preempted"]) == ("107000.000", "7")


def test_the_share_of_masked_tokens_is_a_line_of_a_step_with_a_mask():
    step = whole_step() | dict.fromkeys(("slowest_sample", "profile", "memory", "masked_share")) | {"alarms": []}
    assert [*step_record.record_lines(step)] == []
    (line,) = step_record.record_lines({**step, "masked_share": 0.00125})
    assert line == "step 3: rollout_rs masked 0.1250% of the response tokens"


def test_the_record_of_a_step_has_the_share_of_all_ranks():
    ranks = [{"equal": 3, "of": 4, "bytes": 8}, None, {"equal": 4, "of": 4, "bytes": 9}]
    found = step_record.replay_totals(ranks)
    assert found == {"agreement": 0.875, "bytes": 9}
    assert (
        step_record.replay_totals([None]) is None
        and step_record.replay_totals([{"equal": 0, "of": 0, "bytes": 0}]) is None
    )


def test_reshard_is_taken_out_of_the_rollout_it_lies_in():
    metrics = {"timing_s/gen": 3.0, "timing_s/update_actor": 2.0, "timing_s/step": 6.0, "other": 1}
    found = step_record.phase_seconds(metrics, [{"reshard": 1.0}, {"offload": 0.5, "reshard": 0.2}])
    assert found == {"rollout": 2.0, "update": 2.0, "reshard": 1.0, "offload": 0.5, "step": 6.0}


def test_greedy_responses_are_rollout_and_a_validation_with_its_sync_is_no_phase():
    metrics = {"timing_s/gen": 3.0, "timing_s/gen_max": 1.5, "timing_s/testing": 2.0, "timing_s/step": 9.0}
    found = step_record.phase_seconds(metrics, [{"reshard": 1.0, "other": 5.0}])
    assert found == {"rollout": 3.5, "reshard": 1.0, "offload": 0.0, "validate": 2.0, "step": 9.0}
    val = {"score": 0.25, "metrics": {}}
    step = whole_step() | {"seconds": found, "val": val}
    assert table_row(step, step_record.WIDE_VAL_COLUMNS).split()[-2:] == ["0.2500", "2.000"]
    assert table_row(whole_step(), step_record.WIDE_VAL_COLUMNS).split()[-2:] == ["-", "-"]


def test_tokens_are_verls_without_padding():
    lengths = {"prompt_length/mean": 20.0, "response_length/mean": 60.0, "response_length/max": 64.0}
    found = step_record.token_counts({**lengths, "response_length/clip_ratio": 0.5, "perf/total_num_tokens": 640})
    assert (found["total"], found["responses"], found["at_limit"]) == (640, 480, 0.5)
    assert step_record.token_counts(lengths) is None


def test_syncs_of_a_step_are_added_up_and_the_busiest_rank_counts():
    plain = {"sent_bytes": 10, "local_bytes": 1, "collectives": 3, "seconds": {"pack": 0.5, "total": 1.0}}

    def report(received, extra, verified=False):
        sizes = {"received_bytes": received, "peak_extra_bytes": extra}
        return {**plain, **sizes, "verified": verified, "learnt": False}

    sync = step_record.sync_totals([[report(100, 7, True), report(100, 5)], [report(300, 2), report(100, 2)]])
    assert sync["received_bytes"] == {"max": 400, "mean": 300} and sync["collectives"] == 6
    assert sync["syncs"] == 2 and sync["verified"] and not sync["learnt"] and sync["peak_extra_bytes"] == 7
    assert sync["seconds"] == {"pack": 1.0, "total": 2.0}
    assert step_record.sync_totals([[], []]) is None  # verl's own path


def test_the_start_names_the_slowest_worker_of_each_part():
    seconds = [{"start/imports": 2.0, "start/models": 5.0, "offload": 9.0}, {"start/imports": 4.0, "start/groups": 1.0}]
    found = step_record.start_seconds(seconds, [{"cpu_s": 7.0}, {"cpu_s": 6.0}])
    assert found["imports"] == {"max_s": 4.0, "mean_s": 3.0, "rank": 1} and found["cpu"]["rank"] == 0
    assert (found["groups"]["max_s"], found["models"]["mean_s"]) == (1.0, 2.5) and "offload" not in found


def report(stage, skipped=1, in_a_row=1, nearest=None, parameters=4):
    fault = nearest and {"parameters": parameters, "nearest": nearest}
    return {"skipped": skipped, "in_a_row": in_a_row, "stage": stage, "fault": fault}


def test_the_record_of_a_step_names_the_rank_nearest_to_the_loss():
    reports = [report(0, nearest="embedding.weight"), report(1, nearest="decoder.layers.3.w"), report(1), report(0)]
    found = step_record.skipped_totals(reports)
    place = {"rank": 1, "stage": 1, "parameter": "decoder.layers.3.w", "parameters": 4}
    assert found == {"steps": 1, "in_a_row": 1, "ranks": [0, 1], "nearest": place}
    assert "rank 1, pipeline stage 1, decoder.layers.3.w and 3 more" in step_record.skipped_text(found)
    assert "each rank's own gradients are finite" in step_record.skipped_text(step_record.skipped_totals([report(0)]))
    assert step_record.skipped_text(step_record.skipped_totals([report(0, skipped=0, in_a_row=0)])) == ""
    assert step_record.skipped_totals([None, None]) is None
