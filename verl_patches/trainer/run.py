"""Run verl's fit() in the trainer's process, and record and check each of its steps.

fit_recorded       compares patches, installs our worker groups (trainer/worker_group.py), calls fit, records its end
record_validation  records a validation before the first step
after_step         record_step: makes one record from verl's metrics and the workers' reports, its table row and metrics
                   check_step: checks skipped optimizer steps, log-probs and alarms; each may end the run
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from verl_patches.current import Current
from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import CALL_LABELS
from verl_patches.memory import counters
from verl_patches.patching import engine
from verl_patches.patching.handshake import (
    gather_proofs,
    require_proofs,
    require_same_patches,
    summary_entry,
    unreviewed_rows,
)
from verl_patches.platform import load_emulation
from verl_patches.spec import run_from_config, write_run
from verl_patches.step.log_probs import logprob_check
from verl_patches.step.log_probs.rollout_correction import add_worker_metrics
from verl_patches.step.objectives.advantages import FixedData, current_fixed_data
from verl_patches.step.replay.recording import ROLLOUTS
from verl_patches.trainer import alarms, step_record
from verl_patches.trainer.checkpoint import Checkpoints
from verl_patches.trainer.dispatch import object_store_usage, take_calls
from verl_patches.trainer.ray_start import dead_actors
from verl_patches.trainer.record import NOW_FILE, STEP_PREFIX, Progress, Summary, write_json
from verl_patches.trainer.step_record import Rates, start_seconds
from verl_patches.trainer.validation import add_tensorboard_samples, read_validation
from verl_patches.weights.checkpoint_files import CheckpointError

log = logging.getLogger(__name__)
DEAD_SHOWN = 16  # an error names at most so many dead workers
_RAISING_ACTOR = re.compile(r"\(pid=\d+, ip=[^,()]+, actor_id=(\w+)")
current_run: Current[TrainerRun | None] = Current(None)


class WorkerDiedError(RuntimeError):
    """Report that a worker process ended during the run."""


class TrainerRun:
    """Wrap one RayPPOTrainer.fit()."""

    def __init__(self, trainer: Any):
        self.trainer, self.run = trainer, run_from_config(trainer.config)
        self.recipe = self.run.recipe
        self.folder = self.run.folder if self.run.start.name else None  # None without the launcher
        self.not_compared = logprob_check.unchecked_reason(self.run)
        self.fixed_data = None if self.run.samples else FixedData(self.recipe.objective)
        self.group: Any = None
        self.checkpoints: Checkpoints | None = None  # None if row checkpoint.save is off
        self.current_call: dict[str, Any] = {}
        self.emulated: dict[str, Any] | None = None  # calls of an emulated device
        self.worker_places: dict[int, str] = {}  # rank -> pid and node, as the worker reported them in prove_patches
        dirty = getattr(trainer, "modified_sources", None)  # set by import_alone.py, without the launcher
        self.summary = Summary(
            self.folder,
            {
                "run": self.recipe.run,
                "resumed_step": None,
                "line": self.recipe.line,
                "platform": self.recipe.platform,
                "layout": {
                    "train": str(self.run.train),
                    "rollout": "none: fixed data" if self.fixed_data else str(self.run.rollout),
                },
                "ranks": self.run.world_size,
                "recompute_layers": _recompute_layers(trainer.config.actor_rollout_ref.model),
                "dtype": self.recipe.dtype,
                **({"dirty": dirty} if dirty else {}),
            },
        )
        self.progress = Progress(self.folder)
        self.rates = Rates(self.run, ref=trainer.use_reference_policy)

    def fit_recorded(self, fit: Callable[[], Any]) -> Any:
        """Run `fit` (verl's) after the handshake, and record the outcome in any case."""
        reason, may_complete = "failed", True  # the second: whether workers may complete a checkpoint in progress
        try:
            result = None
            if self.run.probes:
                self.probe_devices()
            else:
                self.compare_patches()
                self.wrap_groups()
                result = fit()
            if self.checkpoints is not None:
                self.checkpoints.finish()
            reason = "ok"
            return result
        except BaseException as error:
            reason = exit_reason(error, self.raising_rank_text(error))
            dead = self.dead_workers() if isinstance(error, Exception) else []
            may_complete = not dead and not isinstance(error, CheckpointError)
            if dead:
                reason = f"{self.death_text(dead)}; first error: {reason}"
                raise WorkerDiedError(reason) from error
            raise
        finally:
            try:
                self.record_outcome(reason)  # before waiting: the wait may be killed
            finally:
                if self.checkpoints is not None:
                    self.checkpoints.abort_save(wait=may_complete)
            self.summary.write()

    def probe_devices(self) -> None:
        """Let the workers, which have no models, measure RunSpec.probes, and record what each rank returns."""
        found = self.summary.data["probes"] = {}
        for what, run in self.run.probes.items():
            self.progress.say(f"~ measuring {what}")
            config = self.trainer.config.copy()
            if run:
                write_run(config, run)
            found[what] = self.trainer.actor_rollout_wg.probe(config, what)
            self.summary.write()

    def compare_patches(self) -> None:
        """Compare and record the patches of all processes; raise RecipeError before step 1 if they differ."""
        own = engine.current_engine()
        workers = gather_proofs(self.trainer.actor_rollout_wg)
        self.worker_places = {worker["rank"]: worker["where"] for worker in workers if not worker["error"]}
        rows = [{"process": "controller", **row} for row in own.status()]
        rows += [{"process": f"worker {w['rank']}", **row} for w in workers for row in w["status"]]
        self.summary.data["patches"] = [summary_entry(row) for row in rows]
        self.summary.data["digest"] = own.digest()
        self.summary.write()
        own.verify("controller")
        require_proofs(workers)
        require_same_patches(own.intent(), own.digest(), workers)
        reports = self.trainer.actor_rollout_wg.take_report()  # drop the counts of initialisation
        self.summary.data["start"] = start_seconds([report["seconds"] for report in reports], workers)
        take_calls()
        self.progress.say(f"| patches proven in controller and {len(workers)} workers: digest {own.digest()[:12]}")
        for state, ids in unreviewed_rows(rows).items():
            self.progress.say(f"| {state} (drift={own.switches.drift}, reasons in summary.json): {', '.join(ids)}")
        if self.not_compared:
            self.progress.say(f"| log-probs are not compared: {self.not_compared}")

    def wrap_groups(self) -> None:
        """Replace the trainer's worker groups by RecipeWorkerGroups."""
        from verl_patches.trainer.worker_group import RecipeWorkerGroup  # imports verl

        trainer = self.trainer
        record_to = profile_to = None
        if self.folder is not None:
            profile_to = (self.folder / "profile").absolute()
            if self.recipe.rollout.record and self.fixed_data is None:
                record_to = self.folder / ROLLOUTS
        self.group = RecipeWorkerGroup(
            trainer.actor_rollout_wg, trainer, self.show_call, record_to, profile_to=profile_to
        )
        trainer.actor_rollout_wg = self.group
        add_tensorboard_samples(trainer.validation_generations_logger)
        if self.group.filtered_groups is not None:
            trainer.train_dataloader = self.group.filtered_groups
        if engine.is_on("checkpoint.save"):
            self.checkpoints = trainer.recipe_checkpoints = Checkpoints(trainer, self.show_resumed)
            self.summary.data["checkpoints"] = self.checkpoints.records
        if trainer.use_reference_policy and not getattr(trainer, "ref_in_actor", False):
            trainer.ref_policy_wg = RecipeWorkerGroup(trainer.ref_policy_wg, trainer, self.show_call, actor=self.group)
        if trainer.use_critic:
            trainer.critic_wg = RecipeWorkerGroup(trainer.critic_wg, trainer, self.show_call, actor=self.group)

    def show_resumed(self, text: str, step: int | None = None) -> None:
        """Show a line about checkpoints, and record the step after which this process continues."""
        self.progress.say(f"| {text}")
        if step is not None:
            self.summary.data["resumed_step"] = step
            self.summary.write()

    @property
    def step(self) -> int:
        """Return the step that runs now; 0 before the first."""
        return self.group.step if self.group else 0

    def dead_workers(self) -> list[int]:
        """Return the ranks whose processes have ended; [] if Ray cannot tell, so that the first error stays visible."""
        try:
            return dead_actors(self.trainer.actor_rollout_wg._workers)
        except Exception:
            log.warning("verl_patches: cannot tell which workers are alive", exc_info=True)
            return []

    def death_text(self, ranks: list[int]) -> str:
        """Return one sentence that names the dead workers: rank, pid and node."""
        names = [f"rank {rank} ({self.worker_places.get(rank, 'pid unknown')})" for rank in ranks[:DEAD_SHOWN]]
        more = f" and {len(ranks) - DEAD_SHOWN} more" if len(ranks) > DEAD_SHOWN else ""
        one = "a worker process" if len(ranks) == 1 else f"{len(ranks)} worker processes"
        return (
            f"{one} died in step {self.step}, by a signal or out of memory: {', '.join(names)}{more}; look at dmesg "
            "there. Errors of other workers are a consequence"
        )

    def raising_rank_text(self, error: BaseException) -> str:
        """Return "rank 1 (pid 12 on host) in step 3: " for an error that a worker raised, else ""."""
        match = _RAISING_ACTOR.search(f"{error} {error.__cause__}")  # Ray writes it into the text of a task's error
        if match is None or self.group is None:
            return ""
        actors = [actor._actor_id.hex() for actor in self.group._workers]
        if match[1] not in actors:
            return ""
        rank = actors.index(match[1])
        return f"rank {rank} ({self.worker_places.get(rank, 'pid unknown')}) in step {self.step}: "

    def show_call(self, step: int, name: str) -> None:
        """Show the call that runs now, and write it to now.json: {step, steps, call, phase, since, step_since}."""
        heartbeat.current_heartbeat().set_controller_step(step, name)
        self.progress.say(f"{STEP_PREFIX}{step}/{self.trainer.total_training_steps}: {CALL_LABELS[name]}")
        now = time.time()
        begun = self.current_call["step_since"] if self.current_call.get("step") == step else now
        steps, times = self.trainer.total_training_steps, {"since": now, "step_since": begun}
        self.current_call = {"step": step, "steps": steps, "call": name, "phase": CALL_LABELS[name], **times}
        if self.folder is not None:
            write_json(self.folder / NOW_FILE, self.current_call)

    def record_validation(self, metrics: dict[str, Any], validation: dict[str, Any], step: int) -> None:
        """Record a validation before this process's first step; `step` is 0, or the step resumed from."""
        self.trainer.actor_rollout_wg.take_report()  # drop the counts of its weight sync and rollout
        take_calls()
        self.summary.data["val_before"] = {"step": step, "val": validation}
        self.summary.write()
        self.summary.add_metrics(step, metrics)
        self.progress.say(f"| validation after step {step}: {validation['score']:.4f}")

    def after_step(self, metrics: dict[str, Any], step: int, log: Callable[[dict[str, Any]], Any]) -> Any:
        """Record one step, log its metrics with ours added, then check it; a failed check ends the run."""
        record, metrics = self.record_step(metrics, step)
        logged = log(metrics)
        self.check_step(record)
        return logged

    def record_step(self, metrics: dict[str, Any], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (record of a step, its metrics with ours added), and write both to the run's folder."""
        recipe, group = self.recipe, self.group
        reports = self.trainer.actor_rollout_wg.take_report()
        emulator = load_emulation(recipe.platform)
        self.emulated = None if emulator is None else emulator.total_usage([report["emulated"] for report in reports])
        metrics = add_worker_metrics(metrics, [report["log_prob_sums"] for report in reports], recipe)
        if group.cache is not None:  # without those of verl's balance_batch, whose partition is not used
            metrics = {name: value for name, value in metrics.items() if not name.startswith("global_seqlen/")}
        record = step_record.make_record(step, metrics, reports)
        if self.fixed_data is not None:
            found = self.fixed_data.step_metrics(metrics)
            metrics |= found
            absent = ("rollout", "reshard") if self.run.trains_actor else ("rollout", "reshard", "update")
            record["seconds"] = {p: s for p, s in record["seconds"].items() if p not in absent}
            record |= {"reward": None, "objective": {name.rpartition("/")[2]: value for name, value in found.items()}}
        if recipe.train.skip_old_log_prob:
            record["seconds"].pop("log_prob", None)
        record["logprob_delta"] = self._logprob_delta(metrics)
        if engine.is_on("dispatch.put_once"):
            record["dispatch"] = take_calls()
        own = counters.host_memory()
        own |= {"controller_rss_bytes": own.pop("rss_bytes"), **object_store_usage()}
        record["usage"] = step_record.largest_usage([*(report["usage"] for report in reports), own], record["memory"])
        record |= group.end_step()
        record["rates"] = self.rates.step_rates(group.lengths, record["tokens"], record["seconds"])
        record["alarms"] = alarms.step_alarms(record, self.summary.data["steps"], metrics, recipe.alarms)
        self.summary.add_step(record)
        self._show_step(record)
        metrics = {**metrics, **step_record.record_metrics(record)}
        self.summary.add_metrics(step, metrics)
        return record, metrics

    def _show_step(self, record: dict[str, Any]) -> None:
        for prefix, columns in step_record.table_columns(self.run):
            if len(self.summary.data["steps"]) == 1:
                self.progress.say(f"{prefix} {step_record.table_header(columns, self.fixed_data is not None)}")
            self.progress.say(f"{prefix} {step_record.table_row(record, columns)}")
        if text := step_record.health_text(record):
            self.progress.say(f"=      {text}")
        for text in step_record.record_lines(record):
            self.progress.say(f"| {text}")

    def check_step(self, record: dict[str, Any]) -> None:
        """End the run if a recorded step is beyond a limit: skipped optimizer steps, log-probs, alarms."""
        alarms.check_skipped_steps(record, self.recipe.train.max_skipped_steps)
        check = self.recipe.logprob_check
        sampled = self.group.sampled_check
        compared = not self.not_compared if sampled is None else sampled.report is not None
        if check.action == "stop" and compared:
            limit = getattr(check, f"max_mean_{self.recipe.dtype}")
            logprob_check.check_delta(record["step"], record["logprob_delta"], limit)
        alarms.check_alarms(record, self.recipe.alarms)

    def _logprob_delta(self, metrics: dict[str, Any]) -> dict[str, float] | None:
        """Return the step's difference of vLLM's and Megatron's log-probs; None if they were not compared."""
        if self.group.sampled_check is not None:
            report = self.group.sampled_check.report
            return None if report is None else report["delta"]
        return None if self.not_compared else logprob_check.logprob_delta(metrics)

    def record_outcome(self, reason: str) -> None:
        """Write the outcome to summary.json."""
        self.summary.data["exit"] = reason
        if self.emulated:
            self.summary.data["emulated"] = self.emulated
        self.summary.write()


def _recompute_layers(model: Any) -> int | list[int] | None:
    """Return activations_checkpoint_num_layers of verl's section `model`; 0 without gradient checkpointing."""
    if not model.get("enable_gradient_checkpointing"):
        return 0
    layers = (model.get("gradient_checkpointing_kwargs") or {}).get("activations_checkpoint_num_layers")
    return layers if layers is None or isinstance(layers, int) else list(layers)


def exit_reason(error: BaseException, raised_by: str = "") -> str:
    """Return the error's type and message; for a worker's error, without the traceback that Ray puts before it.

    raised_by: names the worker, as the beginning of the sentence.
    """
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
        error = error.cause
    return f"{raised_by}{type(error).__name__}: {error}"


def fit_as_run(original: Callable) -> Callable:
    """Wrap RayPPOTrainer.fit in a TrainerRun."""

    @functools.wraps(original)
    def fit(trainer: Any) -> Any:
        run = TrainerRun(trainer)
        with current_run.set(run), current_fixed_data.set(run.fixed_data):
            return run.fit_recorded(lambda: original(trainer))

    return fit


def log_with_run(original: Callable) -> Callable:
    """Wrap verl's Tracking.log so that the active run reads each step's metrics first."""

    @functools.wraps(original)
    def log_metrics(self: Any, data: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> Any:
        def log(metrics: dict[str, Any]) -> Any:
            return original(self, metrics, step, *args, **kwargs)

        if current_run.value is not None and "critic/score/mean" in data:
            return current_run.value.after_step(data, step, log)
        if current_run.value is not None and (validation := read_validation(data)):
            current_run.value.record_validation(data, validation, step)
        return log(data)

    return log_metrics
