"""One run in the trainer's process: the handshake before step 1; then a table row, a record and a check every step."""

from __future__ import annotations

import functools
import logging
import math
import re
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_patches.errors import place_in
from verl_patches.layout.parallel import rollout_layout_of, train_layout_of, world_size
from verl_patches.log_probs import rollout_correction, truth_check
from verl_patches.log_probs.on_policy import correction_of
from verl_patches.memory.counters import offload_of_step
from verl_patches.memory.ledger import memory_of_step, said_of
from verl_patches.patching import engine
from verl_patches.platform import emulation
from verl_patches.trainer import alarms, skipped_steps
from verl_patches.trainer.checkpoint import Checkpoints
from verl_patches.trainer.dispatch import dispatch_of_step, take_calls
from verl_patches.trainer.rates import Rates, metrics_of, profile_of_step, said_of_profile
from verl_patches.trainer.ray_start import dead_actors
from verl_patches.trainer.summary import (
    NOW,
    STEP,
    Progress,
    Summary,
    new_run_id,
    phase_seconds,
    run_id,
    sync_of_step,
    tokens_of_step,
    write_json,
)
from verl_patches.trainer.worker_handshake import (
    not_as_reviewed,
    recorded,
    refuse_unequal,
    refuse_unlike,
    refuse_unproven,
    workers_proofs,
)
from verl_patches.watch import heartbeat

log = logging.getLogger(__name__)
# columns of the step table behind step, reward, grad_norm and |dlogp|: phases that sample and train, the whole step and
# memory; with --wide all of them
NARROW = ("rollout s", "update s", "step s", "held MB")
PHASES = ("rollout", "reshard", "offload", "reward", "log_prob", "ref", "update", "step")
SYNC_COLUMNS = ("sync MB", "sync calls", "extra MB")
DISPATCH_COLUMNS = ("sent MB", "skew s")
WIDE = (*(f"{phase} s" for phase in PHASES), *SYNC_COLUMNS, "held MB", *DISPATCH_COLUMNS)
REPLAY_COLUMNS = ("agreement",)  # with recipe.train.routing_replay
DEAD_SHOWN = 16  # dead workers that an error names
CALLS = {
    "generate_sequences": "reshard, rollout",
    "reward": "reward",
    "compute_log_prob": "log-prob",
    "compute_ref_log_prob": "ref log-prob",
    "update_actor": "update",
}
_RAISED_IN = re.compile(r"\(pid=\d+, ip=[^,()]+, actor_id=(\w+)")
_active: Run | None = None


class WorkerDiedError(RuntimeError):
    """A worker process ended during the run."""


class Run:
    """Wraps one RayPPOTrainer.fit()."""

    checkpoints: Checkpoints | None = None
    rates: Rates | None = None

    def __init__(self, trainer: Any):
        self.trainer, self.recipe = trainer, trainer.config.recipe
        self.folder = None if self.recipe.run is None else Path(self.recipe.output_root) / self.recipe.run
        # of launch/import_alone.py; the launcher keeps one in the run's folder
        self.id = getattr(trainer, "run_id", None) or run_id(self.folder) or new_run_id(self.folder, self.recipe.run)
        self.not_compared = truth_check.not_compared(trainer.config)
        self.workers_see_log_probs = (
            self.recipe.train.skip_old_log_prob
            or correction_of(self.recipe.rollout_correction) is not None
            or self.recipe.tensor_cache.enabled
        )
        self.group: Any = None
        self.now: dict[str, Any] = {}
        self.coverage: tuple[dict[str, Any], list[str]] | None = None  # of an emulated device: data, lines
        self.places: dict[int, str] = {}  # rank -> pid and node, as the worker itself gave them in its proof
        dirty = getattr(trainer, "modified_sources", None)  # of launch/import_alone.py; the launcher adds its own
        self.summary = Summary(
            self.folder,
            {
                "run": self.recipe.run,
                "id": self.id,
                "resumed_step": None,
                "line": self.recipe.line,
                "platform": self.recipe.platform,
                "layout": {
                    "train": str(train_layout_of(trainer.config)),
                    "rollout": str(rollout_layout_of(trainer.config)),
                },
                "ranks": world_size(trainer.config),
                "dtype": self.recipe.dtype,
                **({"dirty": dirty} if dirty else {}),
            },
        )
        self.progress = Progress(self.folder)
        self.rates = Rates(trainer.config, ref=trainer.use_reference_policy)

    def prove(self) -> None:
        """Compare the patches of all processes and record their states; RecipeError before step 1."""
        own = engine.current()
        workers = workers_proofs(self.trainer.actor_rollout_wg)
        self.places = {worker["rank"]: worker["where"] for worker in workers if not worker["error"]}
        rows = [{"process": "controller", **row} for row in own.status()]
        rows += [{"process": f"worker {w['rank']}", **row} for w in workers for row in w["status"]]
        self.summary.data["patches"] = [recorded(row) for row in rows]
        self.summary.data["digest"] = own.digest()
        self.summary.write()
        own.verify("controller")
        refuse_unproven(workers)
        refuse_unequal(own.intent(), own.digest(), workers)
        refuse_unlike([name for name, spec in own.specs.items() if "worker" in spec.processes], workers)
        reports = self.trainer.actor_rollout_wg.take_report()  # initialisation belongs to no step
        self.summary.data["start"] = start_of_workers([report["seconds"] for report in reports], workers)
        take_calls()
        self.progress.say(f"| patches proven in controller and {len(workers)} workers: digest {own.digest()[:12]}")
        for state, ids in not_as_reviewed(rows).items():
            self.progress.say(f"| {state} (drift={own.switches.drift}, reasons in summary.json): {', '.join(ids)}")
        if self.not_compared:
            self.progress.say(f"| log-probs are not compared: {self.not_compared}")

    def wrap_groups(self) -> None:
        """The trainer's groups become RecipeWorkerGroups."""
        from verl_patches.trainer.worker_group import RecipeWorkerGroup  # imports verl

        trainer = self.trainer
        record_to = self.folder / "rollouts" if self.folder and self.recipe.rollout.record else None
        profile_to = self.folder and (self.folder / "profile").absolute()
        self.group = RecipeWorkerGroup(
            trainer.actor_rollout_wg, trainer, self.show_call, record_to, profile_to=profile_to
        )
        trainer.actor_rollout_wg = self.group
        if engine.is_on("checkpoint.save"):
            self.checkpoints = trainer.recipe_checkpoints = Checkpoints(trainer, self.id, self.show_resumed)
            self.summary.data["checkpoints"] = self.checkpoints.records
        if trainer.use_reference_policy and not getattr(trainer, "ref_in_actor", False):
            trainer.ref_policy_wg = RecipeWorkerGroup(trainer.ref_policy_wg, trainer, self.show_call, actor=self.group)

    def show_resumed(self, text: str, step: int | None = None) -> None:
        """Show a line about checkpoints, and record the step that this process goes on after."""
        self.progress.say(f"| {text}")
        if step is not None:
            self.summary.data["resumed_step"] = step
            self.summary.write()

    @property
    def step(self) -> int:
        """The step that runs now; 0 before the first."""
        return self.group.step if self.group else 0

    def dead_workers(self) -> list[int]:
        """Ranks whose processes have ended; none where Ray cannot tell, as the first error must not be hidden."""
        try:
            return dead_actors(self.trainer.actor_rollout_wg._workers)
        except Exception:
            log.warning("verl_patches: cannot tell which workers are alive", exc_info=True)
            return []

    def death_of(self, ranks: list[int]) -> str:
        """One sentence that names the dead workers: rank, pid and node."""
        names = [f"rank {rank} ({self.places.get(rank, 'pid unknown')})" for rank in ranks[:DEAD_SHOWN]]
        more = f" and {len(ranks) - DEAD_SHOWN} more" if len(ranks) > DEAD_SHOWN else ""
        one = "a worker process" if len(ranks) == 1 else f"{len(ranks)} worker processes"
        return (
            f"{one} died in step {self.step}, by a signal or out of memory: {', '.join(names)}{more}; look at dmesg "
            "there. Errors of other workers follow from it"
        )

    def raised_by(self, error: BaseException) -> str:
        """ "rank 1 (pid 12 on host) in step 3: " for an error that a worker raised, else ""."""
        found = _RAISED_IN.search(str(error))  # Ray writes it into the text of a task's error
        if found is None or self.group is None:
            return ""
        actors = [actor._actor_id.hex() for actor in self.group._workers]
        if found[1] not in actors:
            return ""
        rank = actors.index(found[1])
        return f"rank {rank} ({self.places.get(rank, 'pid unknown')}) in step {self.step}: "

    def show_call(self, step: int, name: str) -> None:
        """Show what runs now, and write it to now.json: {step, steps, call, phase, since, step_since}."""
        heartbeat.controller_is_at(step, name)
        self.progress.say(f"{STEP}{step}/{self.trainer.total_training_steps}: {CALLS[name]}")
        now, known = time.time(), self.now.get("step") == step
        self.now = {"step": step, "steps": self.trainer.total_training_steps, "call": name, "phase": CALLS[name]} | {
            "since": now,
            "step_since": self.now["step_since"] if known else now,
        }
        if self.folder is not None:
            write_json(self.folder / NOW, self.now)

    def after_step(self, metrics: dict[str, Any], step: int) -> dict[str, Any]:
        """Record one step and check its log-probs; returns the metrics with ours added."""
        worker: dict[str, float] = {}
        reports = self.trainer.actor_rollout_wg.take_report()
        for report in reports:
            for phase, value in report["seconds"].items():
                worker[phase] = max(worker.get(phase, 0.0), value)
        room = emulation(self.recipe.platform)
        self.coverage = room and room.summary([report["emulated"] for report in reports])
        seconds = phase_seconds(metrics, worker)
        if self.recipe.train.skip_old_log_prob:
            seconds.pop("log_prob", None)
        if self.workers_see_log_probs:
            moments = [report["log_prob_moments"] for report in reports]
            metrics = rollout_correction.with_workers_metrics(metrics, moments, self.recipe)
        delta, compared = self._delta(metrics)
        found = {
            "step": step,
            "seconds": seconds,
            "reward": float(metrics["critic/score/mean"]),
            "tokens": tokens_of_step(metrics),
            "grad_norm": _number(metrics.get("actor/grad_norm")),
            "logprob_delta": delta,
            "sync": sync_of_step([report["sync"] for report in reports]),
            "memory": memory_of_step([report["memory"] for report in reports]),
            "offload": offload_of_step([report["moves"] for report in reports]),
            "dispatch": None,
            "expert_load": reports[0]["expert_load"],
            "rebalance": rebalance_of_step([report["rebalance"] for report in reports]),
            "routing_replay": replay_of_step([report["routing_replay"] for report in reports]),
            "skipped": skipped_steps.skipped_of_step([report["skipped"] for report in reports]),
        }
        if found["routing_replay"]:
            metrics = {**metrics, "recipe/routing_agreement": found["routing_replay"]["agreement"]}
        if self.group.cache is not None:
            metrics = self.group.cache.without_verls_partition(metrics)
        if engine.is_on("dispatch.put_once"):
            found["dispatch"] = dispatch_of_step([report["starts"] for report in reports])
        found |= self.group.end_step()
        found["rates"] = self.rates and self.rates.of_step(self.group.lengths, found["tokens"], seconds)
        found["profile"] = profile_of_step([report["profile"] for report in reports])
        raised = alarms.alarms_of(found, self.summary.own_steps, metrics, self.recipe.alarms)
        found["alarms"] = [vars(alarm) for alarm in raised]
        self.summary.add_step(found)
        first = len(self.summary.own_steps) == 1
        more = REPLAY_COLUMNS if self.recipe.train.routing_replay else ()
        for prefix, columns in (("-", (*NARROW, *more)), ("+", (*WIDE, *more))):
            for text in (*([header(columns)] if first else []), line(found, columns)):
                self.progress.say(f"{prefix} {text}")
        if found["profile"]:
            self.progress.say(f"| step {step}: {said_of_profile(found['profile'])}")
        if found["memory"] and (said := said_of(found["memory"]["violations"])):
            self.progress.say(f"| {said}")
        if skipped := found["skipped"]:
            metrics = {**metrics, skipped_steps.METRIC: skipped["steps"]}
            if said := skipped_steps.said_of(skipped):
                self.progress.say(f"| step {step}: {said}")
        for alarm in raised:
            self.progress.say(f"| step {step}: alarm {alarm.name}: {alarm.text}")
            metrics = {**metrics, f"{alarms.METRIC}/{alarm.name}": 1.0}
        loads = {side: load["max_over_mean"] for side, load in (found["expert_load"] or {}).items() if load}
        ours = {f"recipe/seconds/{phase}": value for phase, value in seconds.items()} | metrics_of(found["rates"])
        metrics = {**metrics, **ours, **{f"recipe/expert_load/{side}": value for side, value in loads.items()}}
        self.summary.add_metrics(step, metrics)
        if skipped:  # each of these checks may end the run, after its last step is written
            skipped_steps.check(step, skipped, self.recipe.train.max_skipped_steps)
        check = self.recipe.logprob_check
        if check.action == "stop" and compared:
            truth_check.check(step, delta, check[f"max_mean_{self.recipe.dtype}"])
        alarms.check(step, raised, self.recipe.alarms.action)
        return metrics

    def _delta(self, metrics: dict[str, Any]) -> tuple[dict[str, float] | None, bool]:
        """(the step's difference of log-probs, whether they had to be compared)."""
        if self.group.sampled_check is not None:
            report = self.group.sampled_check.report
            return report and report["delta"], report is not None
        return None if self.not_compared else truth_check.logprob_delta(metrics), not self.not_compared

    def end(self, reason: str) -> None:
        """Write the outcome."""
        self.summary.data["exit"] = reason
        if self.coverage:
            self.summary.data["emulated"], lines = self.coverage
            for line in lines:
                self.progress.say(f"| {line}")
        self.summary.write()


def start_of_workers(
    seconds: Sequence[dict[str, float]], proofs: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """{part: {max_s, mean_s, rank}} of the workers' start: wall seconds, and of `cpu` CPU seconds; rank: the slowest.

    imports: from the process's begin to the making of its worker; groups: process groups and the engine's arguments;
    models: models, optimizer and rollout engine, with their weights.
    """
    parts = {name: [worker.get(f"start/{name}", 0.0) for worker in seconds] for name in ("imports", "groups", "models")}
    parts["cpu"] = [proof["cpu_s"] for proof in proofs]
    return {
        name: {"max_s": max(found), "mean_s": sum(found) / len(found), "rank": found.index(max(found))}
        for name, found in parts.items()
    }


def rebalance_of_step(counts: list[dict[str, float] | None]) -> dict[str, float] | None:
    """What moved between data-parallel rollout ranks: requests, bytes, seconds of the slowest rank; None where off."""
    found = [each for each in counts if each is not None]
    sums = {name: sum(each[name] for each in found) for name in ("requests", "bytes")}
    return {**sums, "seconds": max(each["seconds"] for each in found)} if found else None


def replay_of_step(counts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Routing replay of all ranks; None where it is off, or nothing was replayed.

    agreement: share of replayed experts that routers chose too; experts: number of them, each tensor-parallel rank that
    sees a token counts it; bytes: recorded on the rank with the most.
    """
    found = [each for each in counts if each is not None]
    experts = sum(each["of"] for each in found)
    if not experts:
        return None
    return {
        "agreement": sum(each["equal"] for each in found) / experts,
        "experts": experts,
        "bytes": max(each["bytes"] for each in found),
    }


def _number(value: Any) -> float | None:
    """A float for JSON, which knows neither NaN nor infinity; a skipped update has no gradient norm."""
    return None if value is None or not math.isfinite(value) else float(value)


def reason_of(error: BaseException, raised_by: str = "", users_file: str | None = None) -> str:
    """The error's type and message; of what a worker raised, without the traceback that Ray puts before it.

    raised_by: the worker, for the beginning of the sentence. users_file: of the reward function; the sentence names
    its line where the error came from there, also in another process.
    """
    from ray.exceptions import RayError, RayTaskError

    place = place_in("".join(traceback.format_exception(error)), users_file)
    if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
        error = error.cause
    return f"{raised_by}{place}{type(error).__name__}: {error}"


def fit_as_run(original: Callable) -> Callable:
    """Provider for RayPPOTrainer.fit."""

    @functools.wraps(original)
    def fit(trainer: Any) -> Any:
        global _active
        if trainer.config.get("recipe") is None:
            return original(trainer)
        run = _active = Run(trainer)
        reason = "failed"
        try:
            run.prove()
            run.wrap_groups()
            result = original(trainer)
            if run.checkpoints is not None:
                run.checkpoints.finish()
            reason = "ok"
            return result
        except BaseException as error:
            users_file = (trainer.config.get("custom_reward_function") or {}).get("path")
            reason = reason_of(error, run.raised_by(error), users_file)
            if isinstance(error, Exception) and (dead := run.dead_workers()):
                reason = f"{run.death_of(dead)}; the first one: {reason}"
                raise WorkerDiedError(reason) from error
            raise
        finally:
            if run.checkpoints is not None:
                run.checkpoints.give_up()
            run.end(reason)
            _active = None

    return fit


def log_with_run(original: Callable) -> Callable:
    """Provider for verl's Tracking.log: the active run reads each step's metrics first."""

    @functools.wraps(original)
    def log_metrics(self: Any, data: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> Any:
        if _active is not None and "critic/score/mean" in data:
            data = _active.after_step(data, step)
        return original(self, data, step, *args, **kwargs)

    return log_metrics


def header(columns: Sequence[str]) -> str:
    """Column names of the step table; `columns` is NARROW or WIDE."""
    return f"{'step':>4} {'reward':>8} {'grad_norm':>10} {'|dlogp|':>9} " + " ".join(f"{c:>10}" for c in columns)


def line(step: dict[str, Any], columns: Sequence[str]) -> str:
    """One row of the step table, with what `header` names."""
    delta = f"{step['logprob_delta']['mean']:.2e}" if step["logprob_delta"] else "-"
    norm = "-" if step["grad_norm"] is None else f"{step['grad_norm']:.5f}"
    if (skipped := step["skipped"]) and skipped["steps"]:
        norm = "skipped"
    cells = _cells(step)
    rest = " ".join(f"{cells.get(column, '-'):>10}" for column in columns)
    return f"{step['step']:>4} {step['reward']:>8.4f} {norm:>10} {delta:>9} {rest}"


def _cells(step: dict[str, Any]) -> dict[str, str]:
    """{column: text} of what the step has.

    Of a weight sync: MB received by the busiest rank, collectives, MB of extra memory. held MB: peak of all memory
    groups of one rank; activations are in none of them. MB that the trainer serialised for its workers, and the largest
    difference between two workers' starts of one call. Share of replayed experts that routers chose
    too.
    """
    cells = {f"{phase} s": f"{step['seconds'].get(phase, 0.0):.3f}" for phase in PHASES}
    if sync := step["sync"]:
        sizes = sync["received_bytes"]["max"] / 1e6, sync["peak_extra_bytes"] / 1e6
        texts = f"{sizes[0]:.3f}", str(sync["collectives"]), f"{sizes[1]:.3f}"
        cells |= dict(zip(SYNC_COLUMNS, texts, strict=True))
    if memory := step["memory"]:
        cells["held MB"] = f"{memory['peak_bytes'] / 1e6:.3f}"
    if dispatch := step["dispatch"]:
        sent = (dispatch["put_bytes"] + dispatch["inline_bytes"]) / 1e6
        texts = f"{sent:.3f}", f"{dispatch['start_skew_s']['max']:.4f}"
        cells |= dict(zip(DISPATCH_COLUMNS, texts, strict=True))
    if replay := step.get("routing_replay"):
        cells["agreement"] = f"{replay['agreement']:.5f}"
    return cells
