"""Make the record of one step from verl's metrics and the workers' reports, for summary.json, table and metrics.

make_record              makes the step's record in summary.json
table_header, table_row  format the step table
health_text              returns the step's line of health, shown below its row
record_lines             yields the lines shown below that
record_metrics           returns the record's figures for Tracking and metrics.jsonl
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from verl_patches.layout.flops import PEAK_FLOPS_PER_S, batch_forward_flops, passes
from verl_patches.layout.phases import STEP_PHASES, VALIDATE
from verl_patches.memory.counters import offload_summary
from verl_patches.memory.ledger import memory_summary, violation_text
from verl_patches.rewards.parts import REWARD_PREFIX
from verl_patches.spec import RunSpec
from verl_patches.step.log_probs.ratio_settings import MASKED_SHARE, needs_old_log_probs
from verl_patches.trainer.validation import read_validation

# columns of the step table after step, reward, grad_norm and |dlogp|: phases that sample and train, the whole step
# and memory; --wide shows all columns
NARROW_COLUMNS = ("rollout s", "update s", "step s", "held MB")
PHASES = (*(phase.name for phase in STEP_PHASES if phase.name != "advantage" and not phase.critic), "step")
SYNC_COLUMNS = ("sync MB", "sync calls", "extra MB")
WIDE_COLUMNS = (*(f"{phase} s" for phase in PHASES), *SYNC_COLUMNS, "held MB", "sent MB", "preempted")
# on fixed data: accuracy is added, loss and margin replace reward and |dlogp|, and columns of a rollout are left out
OBJECTIVE_COLUMNS, ROLLOUT_COLUMNS = ("accuracy",), ("rollout s", "reshard s", *SYNC_COLUMNS, "preempted")
VAL_COLUMNS, WIDE_VAL_COLUMNS = ("val",), ("val", f"{VALIDATE} s")  # with trainer.test_freq
CRITIC_SECONDS = tuple(f"{phase.name} s" for phase in STEP_PHASES if phase.critic)
# columns of a run with a critic, from verl's metrics; expl_var: 1 - var(returns - values) / var(returns)
CRITIC_COLUMNS = ("vf_loss", "vf_norm", "expl_var")
_CRITIC = {"loss": "critic/vf_loss", "grad_norm": "critic/grad_norm", "explained_var": "critic/vf_explained_var"}
SKIPPED_STEPS_METRIC, ALARM_METRICS = "recipe/skipped_steps", "recipe/alarms"  # names of our metrics


def make_record(step: int, metrics: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record of `step` from verl's metrics and every worker's `take_report` (worker/recipe_worker.py).

    Values that neither has are empty here and set in trainer/run.py: rewards, slowest_sample, objective, logprob_delta,
    usage, dispatch, rates, alarms.
    """

    def reported(name: str) -> list[Any]:
        return [report[name] for report in reports]

    preempted = [count for count in reported("preempted") if count is not None]
    return {
        "step": step,
        "seconds": phase_seconds(metrics, reported("seconds")),
        "reward": float(metrics["critic/score/mean"]),
        "rewards": None,
        "slowest_sample": None,
        "objective": None,
        "val": read_validation(metrics),
        "tokens": token_counts(metrics),
        "grad_norm": _finite_number(metrics.get("actor/grad_norm")),
        "critic": critic_figures(metrics),
        "logprob_delta": None,
        "masked_share": metrics.get(MASKED_SHARE),
        "sync": sync_totals(reported("sync")),
        "memory": memory_summary(reported("memory")),
        "offload": offload_summary(reported("moves")),
        "usage": {},
        "dispatch": None,
        "expert_load": reports[0]["expert_load"],
        "preempted": sum(preempted) if preempted else None,  # by vLLM, which computed these responses again
        "routing_replay": replay_totals(reported("routing_replay")),
        "skipped": skipped_totals(reported("skipped")),
        "rates": None,
        "profile": trace_files(reported("profile")),
        "alarms": [],
    }


def record_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return {name: value} of the record's figures that verl's metrics do not have."""
    metrics = {f"recipe/seconds/{phase}": seconds for phase, seconds in record["seconds"].items()}
    metrics |= _rates_by_name(record["rates"])
    metrics |= {f"{REWARD_PREFIX}{label}": mean for label, mean in (record["rewards"] or {}).items()}
    if record["expert_load"]:
        metrics["recipe/expert_load/train"] = record["expert_load"]["train"]["max_over_mean"]
    if record["preempted"] is not None:
        metrics["recipe/preempted"] = record["preempted"]
    metrics |= {f"recipe/usage/{name}": size for name, size in record["usage"].items()}
    if record["slowest_sample"]:
        metrics["recipe/slowest_reward_s"] = record["slowest_sample"]["seconds"]
    if record["routing_replay"]:
        metrics["recipe/routing_agreement"] = record["routing_replay"]["agreement"]
    if record["skipped"]:
        metrics[SKIPPED_STEPS_METRIC] = record["skipped"]["steps"]
    metrics |= {f"recipe/filter_groups/{name}": float(value) for name, value in record.get("filter_groups", {}).items()}
    return metrics | {f"{ALARM_METRICS}/{alarm['name']}": 1.0 for alarm in record["alarms"]}


def health_text(record: Mapping[str, Any]) -> str:
    """Return the step's preemptions, longest and cut responses, slowest reward and expert loads; docs/operate.md."""
    tokens, slowest, parts = record["tokens"], record["slowest_sample"], []
    if tokens and not record["objective"]:
        parts.append(f"longest response {tokens['response_max']:.0f} tokens, {tokens['at_limit']:.0%} cut")
    if record["preempted"] is not None:
        parts.append(f"{record['preempted']} preempted")
    if slowest:
        parts.append("slowest reward {seconds:.2f} s (sample {sample} of {data_source})".format(**slowest))
    if record["expert_load"]:
        parts.append(f"busiest expert {record['expert_load']['train']['max_over_mean']:.1f} x the mean")
    return "; ".join(parts)


def record_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below the step's row and its health: traces, memory, skipped steps, masked tokens, alarms."""
    step = f"step {record['step']}: "
    if profile := record["profile"]:
        faults = profile["faults"]
        more = f"; {len(faults)} could not be written, first: {faults[0]}" if faults else ""
        yield f"{step}profiled, so its times are not comparable: {len(profile['files'])} files in profile/{more}"
    if record["memory"] and (text := violation_text(record["memory"]["violations"])):
        yield text
    if record["skipped"] and record["skipped"]["steps"]:
        yield step + skipped_text(record["skipped"])
    if record["masked_share"] is not None:
        yield f"{step}rollout_rs masked {record['masked_share']:.4%} of the response tokens"
    if filtered_groups := record.get("filter_groups"):
        text = "{differ} of {prompts} prompts in {drawn_batches} batches have responses with different rewards"
        yield step + text.format(**filtered_groups)
    for alarm in record["alarms"]:
        yield f"{step}alarm {alarm['name']}: {alarm['text']}"


def phase_seconds(metrics: Mapping[str, float], workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return {phase: seconds} of one step: verl's timers, with reshard subtracted from the rollout that contains it.

    rollout includes ReMax's greedy responses. validate, if the step has one, is part of `step` but of no other
    phase. reshard and offload are those of the slowest worker. offload happens inside reshard, rollout, log-prob, ref
    and update, and is not subtracted from them.
    """
    timers = {key.removeprefix("timing_s/"): float(v) for key, v in metrics.items() if key.startswith("timing_s/")}
    phase_s = {phase.name: timers[phase.timer] for phase in STEP_PHASES if phase.timer in timers}
    for phase in (phase.name for phase in STEP_PHASES if phase.timer is None):
        phase_s[phase] = max(seconds.get(phase, 0.0) for seconds in workers)
    if "testing" in timers:
        phase_s[VALIDATE] = timers["testing"]
    if "rollout" in phase_s:
        phase_s["rollout"] += timers.get("gen_max", 0.0)
        phase_s["rollout"] = max(phase_s["rollout"] - phase_s["reshard"], 0.0)
    phase_s["step"] = timers.get("step", 0.0)
    return {phase: round(seconds, 4) for phase, seconds in phase_s.items()}


def token_counts(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """Return a step's numbers of tokens without padding, from verl's metrics; None if verl has none.

    total, responses: tokens of prompts and responses, of responses only; response_mean, response_max: lengths;
    at_limit: share of the responses that end at the length limit.
    """
    if "perf/total_num_tokens" not in metrics:
        return None
    total, response = float(metrics["perf/total_num_tokens"]), float(metrics["response_length/mean"])
    prompt = float(metrics["prompt_length/mean"])
    return {
        "total": total,
        "responses": round(total * response / (prompt + response)),
        "response_mean": response,
        "response_max": float(metrics["response_length/max"]),
        "at_limit": float(metrics["response_length/clip_ratio"]),
    }


def critic_figures(metrics: Mapping[str, float]) -> dict[str, float | None] | None:
    """Return {loss, grad_norm, explained_var} of the critic's update; None in a run without a critic."""
    found = {name: _finite_number(metrics.get(key)) for name, key in _CRITIC.items()}
    return found if _CRITIC["loss"] in metrics else None


def sync_totals(workers: list[list[dict[str, Any]]]) -> dict[str, Any] | None:
    """Return the totals of a step's weight syncs, from every worker's reports; None if verl's own path did them.

    Bytes are per rank, as maximum and mean over ranks, summed over the step's syncs (a validation syncs too).
    Collectives and seconds are summed as well; `peak_extra_bytes` is the highest of any rank. verified, learnt: whether
    a sync was verified, or learnt its map (reshard/weight_sync.py).
    """
    every = [report for reports in workers for report in reports]
    if not every:
        return None
    sync: dict[str, Any] = {"syncs": max(map(len, workers))}
    sync |= {fact: any(report[fact] for report in every) for fact in ("verified", "learnt")}
    for name in ("sent_bytes", "received_bytes", "local_bytes"):
        rank_bytes = [sum(report[name] for report in reports) for reports in workers]
        sync[name] = {"max": max(rank_bytes), "mean": round(sum(rank_bytes) / len(rank_bytes))}
    sync["collectives"] = max(sum(report["collectives"] for report in reports) for reports in workers)
    sync["peak_extra_bytes"] = max(report["peak_extra_bytes"] for report in every)
    sync["seconds"] = {
        phase: round(max(sum(r["seconds"][phase] for r in reports) for reports in workers), 4)
        for phase in sorted({phase for report in every for phase in report["seconds"]})
    }
    return sync


def largest_usage(processes: Sequence[Mapping[str, float]], memory: Mapping[str, Any] | None) -> dict[str, float]:
    """Return each figure of memory in use as the most of any process, and device_bytes, the most of any phase.

    memory: the step's memory_summary, whose records have what a device has in use where that is measured.
    """
    names = dict.fromkeys(name for usage in processes for name in usage)
    phases = memory["phases"].values() if memory else ()
    used = [phase["measured"]["used"] for phase in phases if "used" in phase["measured"]]
    device = {"device_bytes": max(used)} if used else {}
    return {name: max(usage.get(name, 0) for usage in processes) for name in names} | device


def replay_totals(counts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the figures of routing replay over all ranks; None where it is off, or if nothing was replayed.

    agreement: share of replayed experts that the routers chose too; bytes: recorded on the rank with the most.
    """
    present = [each for each in counts if each is not None]
    experts = sum(each["of"] for each in present)
    if not experts:
        return None
    agreement = sum(each["equal"] for each in present) / experts
    return {"agreement": agreement, "bytes": max(each["bytes"] for each in present)}


def skipped_totals(reports: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the optimizer steps that the ranks' guards (worker/step_guard.py) skipped in a step; None without guards.

    steps: optimizer steps skipped; in_a_row: longest series of them; ranks: those whose own gradients are not finite;
    nearest: rank, stage and parameter nearest to the loss, where NaN appears first, or None if all ranks' own gradients
    are finite.
    """
    present = [report for report in reports if report is not None]
    if len(present) < len(reports):
        return None
    faulty = {rank: report for rank, report in enumerate(present) if report["fault"]}
    nearest = None
    if faulty:
        rank = max(faulty, key=lambda rank: (faulty[rank]["stage"], -rank))
        fault = faulty[rank]["fault"]
        nearest = {"rank": rank, "stage": faulty[rank]["stage"], "parameter": fault["nearest"]}
        nearest["parameters"] = fault["parameters"]
    return {
        "steps": max(report["skipped"] for report in present),
        "in_a_row": max(report["in_a_row"] for report in present),
        "ranks": sorted(faulty),
        "nearest": nearest,
    }


def skipped_text(skipped: Mapping[str, Any]) -> str:
    """Return one line about skipped optimizer steps; empty if there are none."""
    if not skipped["steps"]:
        return ""
    nearest = skipped["nearest"]
    if nearest is None:
        where = "each rank's own gradients are finite; their sum over data-parallel ranks, or its norm, overflows fp32"
    else:
        ranks = skipped["ranks"]
        others = f" ({len(ranks)} ranks have such gradients)" if len(ranks) > 1 else ""
        where = (
            f"rank {nearest['rank']}, pipeline stage {nearest['stage']}, {nearest['parameter']} and "
            f"{nearest['parameters'] - 1} more parameters{others}"
        )
    count = f"{skipped['steps']} optimizer step(s) skipped, {skipped['in_a_row']} in a row"
    return f"{count}, for NaN or inf gradients: {where}"


def trace_files(workers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return {files, faults} of a step's traces from every worker's report (worker/profile.py); None without traces."""
    present = [worker for worker in workers if worker is not None]
    if not present:
        return None
    return {key: [entry for worker in present for entry in worker[key]] for key in ("files", "faults")}


def _finite_number(value: Any) -> float | None:
    """Return a float for JSON, or None for NaN, infinity and None; a skipped update has no gradient norm."""
    return None if value is None or not math.isfinite(value) else float(value)


def start_seconds(seconds: Sequence[dict[str, float]], proofs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return {part: {max_s, mean_s, rank}} of the workers' start, where rank is the slowest.

    Seconds are wall time, and CPU time for `cpu`. imports: from the start of the process to the making of its worker;
    groups: process groups and the engine's arguments; models: models, optimizer and rollout engine, with their weights.
    """
    parts = {name: [worker.get(f"start/{name}", 0.0) for worker in seconds] for name in ("imports", "groups", "models")}
    parts["cpu"] = [proof["cpu_s"] for proof in proofs]
    return {
        name: {"max_s": max(each), "mean_s": sum(each) / len(each), "rank": each.index(max(each))}
        for name, each in parts.items()
    }


class Rates:
    """Compute the throughput and MFU of a run's steps; layout/flops.py defines MFU.

    `passes`: {phase: its model FLOPs, in forward passes}. `peak_flops_per_s`: None for a device without a known peak.
    """

    def __init__(self, run: RunSpec, ref: bool):
        recipe, critic = run.recipe, run.critic
        self.model, self.ranks = run.model, run.world_size
        self.passes = passes(
            rollout=recipe.rollout.replay is None and run.samples,
            ref=ref,
            old_log_prob=not recipe.train.skip_old_log_prob and (needs_old_log_probs(run) or not run.samples),
            epochs=run.verl.actor_rollout_ref.actor.ppo_epochs if run.trains_actor else 0,
            scores=len(run.reward_models),
            critic_epochs=0 if critic is None else critic.ppo_epochs,
        )
        given = recipe.profile.peak_tflops
        peak = PEAK_FLOPS_PER_S.get(run.platform) if recipe.hardware == "a3" else None
        self.peak_flops_per_s = peak if given is None else given * 1e12

    def step_rates(
        self, lengths: Sequence[int] | None, tokens: Mapping[str, float] | None, seconds: Mapping[str, float]
    ) -> dict[str, Any] | None:
        """Return {tokens_per_s_per_rank, generated_per_s_per_rank, tflops_per_s_per_rank, mfu}; None without an update.

        `lengths`: tokens of each sequence, prompt and response, without padding; `tokens`: from `token_counts`.
        tflops_per_s_per_rank, mfu: {step or phase: rate}; tflops_per_s_per_rank is None without a model, mfu without a
        peak.
        """
        if not lengths or tokens is None or not seconds["step"]:
            return None
        measured: dict[str, Any] = {"tokens_per_s_per_rank": tokens["total"] / seconds["step"] / self.ranks}
        generated = tokens["responses"] / seconds["rollout"] / self.ranks if seconds.get("rollout") else None
        measured |= {"generated_per_s_per_rank": generated, "tflops_per_s_per_rank": None, "mfu": None}
        if self.model is not None:
            forward = batch_forward_flops(self.model, lengths)
            counts = {**self.passes, "step": sum(self.passes.values())}
            rates = {
                phase: count * forward / seconds[phase] / self.ranks
                for phase, count in counts.items()
                if seconds.get(phase)
            }
            measured["tflops_per_s_per_rank"] = {phase: rate / 1e12 for phase, rate in rates.items()}
            if self.peak_flops_per_s:
                measured["mfu"] = {phase: rate / self.peak_flops_per_s for phase, rate in rates.items()}
        return measured


def _rates_by_name(rates: Mapping[str, Any] | None) -> dict[str, float]:
    if rates is None:
        return {}
    metrics = {f"recipe/{name}": rate for name, rate in rates.items() if isinstance(rate, float)}
    for name in ("tflops_per_s_per_rank", "mfu"):
        metrics |= {f"recipe/{name}/{phase}": rate for phase, rate in (rates[name] or {}).items()}
    return metrics


# ---- the step table


def table_columns(run: RunSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (prefix of its lines in progress.log, columns) of a run's narrow and of its wide table."""
    for prefix, columns, val in (("-", NARROW_COLUMNS, VAL_COLUMNS), ("+", WIDE_COLUMNS, WIDE_VAL_COLUMNS)):
        if not run.samples:
            columns = (*OBJECTIVE_COLUMNS, *(column for column in columns if column not in ROLLOUT_COLUMNS))
        if run.has_critic:
            columns += CRITIC_COLUMNS if prefix == "-" else (*CRITIC_SECONDS, *CRITIC_COLUMNS)
        yield prefix, (*columns, *(val if run.verl.trainer.test_freq > 0 else ()))


def table_header(columns: Sequence[str], fixed_data: bool = False) -> str:
    """Return the column names of the step table; `columns` comes from `table_columns`."""
    first, last = ("loss", "margin") if fixed_data else ("reward", "|dlogp|")
    return f"{'step':>4} {first:>8} {'grad_norm':>10} {last:>9} " + " ".join(f"{c:>10}" for c in columns)


def table_row(step: dict[str, Any], columns: Sequence[str]) -> str:
    """Return one row of the step table, with the columns of `table_header`."""
    first = "-" if step["reward"] is None else f"{step['reward']:.4f}"
    last = f"{step['logprob_delta']['mean']:.2e}" if step["logprob_delta"] else "-"
    if objective := step.get("objective"):
        first = f"{objective['loss']:.6f}"
        last = f"{objective['margin']:.4f}" if "margin" in objective else "-"
    norm = "skipped" if (step["skipped"] or {}).get("steps") else "-"
    if step["grad_norm"] is not None:
        norm = f"{step['grad_norm']:.5f}"
    cells = _table_cells(step)
    rest = " ".join(f"{cells.get(column, '-'):>10}" for column in columns)
    return f"{step['step']:>4} {first:>8} {norm:>10} {last:>9} {rest}"


def _table_cells(step: dict[str, Any]) -> dict[str, str]:
    """Return {column: text} of the values that the step has.

    Weight sync: MB received by the busiest rank, collectives, MB of extra memory. held MB: peak of all memory groups of
    one rank, activations not included. sent MB: what the trainer serialised for its workers. preempted: responses that
    vLLM preempted and computed again.
    """
    cells = {f"{phase} s": f"{seconds:.3f}" for phase, seconds in step["seconds"].items()}
    if val := step.get("val"):
        cells["val"] = f"{val['score']:.4f}"
    if critic := step.get("critic"):
        texts: Iterable[str] = ("-" if value is None else f"{value:.5f}" for value in critic.values())
        cells |= dict(zip(CRITIC_COLUMNS, texts, strict=True))
    if sync := step["sync"]:
        sizes = sync["received_bytes"]["max"] / 1e6, sync["peak_extra_bytes"] / 1e6
        texts = f"{sizes[0]:.3f}", str(sync["collectives"]), f"{sizes[1]:.3f}"
        cells |= dict(zip(SYNC_COLUMNS, texts, strict=True))
    if memory := step["memory"]:
        cells["held MB"] = f"{memory['peak_bytes'] / 1e6:.3f}"
    if dispatch := step["dispatch"]:
        cells["sent MB"] = f"{dispatch['put_bytes'] / 1e6:.3f}"
    if "accuracy" in (step.get("objective") or {}):
        cells["accuracy"] = f"{step['objective']['accuracy']:.4f}"
    if step.get("preempted") is not None:
        cells["preempted"] = str(step["preempted"])
    return cells
