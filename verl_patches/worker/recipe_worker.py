"""Run one step of a worker: this class overrides methods of verl's ActorRolloutRefWorker.

    call of the trainer       code here                                       memory phases (memory/schedule.py)
    generate_sequences        sharding.py: weight sync, then wake the cache   reshard, wake_kv
                              rollout_engine.py: vLLM generates and sleeps    rollout, sleep
    compute_log_prob          verl's own                                      old_log_prob
    compute_ref_log_prob      verl's own                                      ref
    update_actor              PolicyUpdate around verl's own                  update
    save_checkpoint           checkpoint.py: a part of a checkpoint
    begin_profile             traces of the step, where recipe.profile names it
    take_report               counters of the step

With recipe.tensor_cache the trainer calls generate_cached, place_cached, log_prob_cached, ref_log_prob_cached and
update_cached: the same stages on tensors that stay in this process (step/batches/cached_batch.py).
trainer/worker_group.py lists the calls in the order of the step.

Row update.recipe_worker installs the class. A row that targets one of its methods is a feature with its own switch.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register

from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import START
from verl_patches.memory import counters
from verl_patches.model.megatron import DTYPES
from verl_patches.patching import engine
from verl_patches.patching.engine import is_on
from verl_patches.platform import load_emulation
from verl_patches.platform.loopback_store import loopback_store
from verl_patches.rollout.engine import PreemptionCounter
from verl_patches.spec import run_from_config
from verl_patches.step.batches import payloads
from verl_patches.step.batches.cached_batch import CachedBatch, cached_batch, padded_prompts
from verl_patches.step.batches.exchange import is_metrics_rank
from verl_patches.step.batches.limits import token_budget
from verl_patches.step.batches.micro_batches import MiniBatchCounts, PlannedSplits, Stage, current_stage
from verl_patches.step.log_probs import rollout_correction
from verl_patches.step.log_probs.policy_update import PolicyUpdate
from verl_patches.step.log_probs.rollout_log_probs import CheckedSample
from verl_patches.step.replay.expert_load import ExpertLoad, count_training_load
from verl_patches.step.replay.routing_replay import RoutingReplay
from verl_patches.worker.checkpoint import TrainingWorker
from verl_patches.worker.context import context
from verl_patches.worker.memory import TrainedModel, WorkerMemory, device_type
from verl_patches.worker.models import prepare_training
from verl_patches.worker.remote_code import trusts_code
from verl_patches.worker.sharding import RecipeShardingManager
from verl_patches.worker.step_guard import take_all_skips

# packages of the rollout engine, which a worker on fixed data does not import
_ENGINE_PACKAGES = ("vllm", "vllm_ascend", "verl.workers.rollout", "verl.workers.sharding_manager.megatron_vllm")


class RecipeWorker(TrainingWorker):
    """Override methods of ActorRolloutRefWorker. The attribute of a feature that is off is None."""

    log_prob_sums: rollout_correction.LogProbSums | None = None
    preemptions: PreemptionCounter | None = None  # on the first rank of a rollout replica
    routing: RoutingReplay | None = None
    expert_load: ExpertLoad | None = None

    def __init__(self, config: Any, role: str) -> None:
        self.run = run_from_config(config)
        trusts_code.value = bool(config.model.get("trust_remote_code"))
        if self.run.recipe.watch.action != "off":
            heartbeat.start_in_ray(f"rank {os.environ['RANK']}", int(os.environ["RANK"]))
        counters.note_process_age("start/imports")
        with counters.time_phase("start/groups"), heartbeat.current_heartbeat().in_call(START), loopback_store():
            if is_on("update.engine_start"):
                from verl_patches.model.mindspeed import start

                start.start(config)  # makes process groups and arguments, which verl then uses
            super().__init__(config, role)
        self.recipe, self.memory = self.run.recipe, WorkerMemory(config, self.run)
        self.compared: set[tuple[str, str]] = set()  # operators and shapes that `probe` has compared
        if self.memory.scheduled:  # then verl's own calls must not move memory
            self._is_offload_param = self._is_offload_optimizer = self._ref_is_offload_param = False
        self.start_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build models, optimizer and rollout with verl, then start the ledger and the schedule.

        Nothing is built if only the critic is trained, or if workers measure devices in place of training.
        """
        if self.run.probes or not self.run.trains_actor:
            return
        with counters.time_phase("start/models"):
            super().init_model()
        self.memory.register_worker(self, self.trained)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe(self, config: Any, what: str) -> Any:
        """Return what this rank measures of RunSpec.probes; config: the whole configuration, also verl's own keys."""
        from verl_patches.worker.probe.groups import measure

        return measure(run_from_config(config), what, self.compared)

    def _build_model_optimizer(self, *args: Any, **kwargs: Any) -> tuple:
        if is_on("model.train_dtype"):
            self.dtype = self.param_dtype = DTYPES[self.recipe.dtype]  # before super() reads them
        built = super()._build_model_optimizer(*args, **kwargs)
        chunks = built[0]
        optimizer = built[1] if self._is_actor else None
        if optimizer is None:
            self.memory.offload_model(chunks)
        else:
            self.trained = TrainedModel(chunks, optimizer, built[2])
            if self.recipe.train.routing_replay and is_on("update.routing_samples"):
                self.routing = RoutingReplay(chunks)
            prepare_training(self.trained, self.memory)
        if self.recipe.expert_load and self._is_actor:
            ranks = {"train": self.run.train.ep, **({"rollout": self.run.rollout.ep} if self.run.samples else {})}
            self.expert_load = count_training_load(chunks, ranks)
        return built

    def _build_rollout(self, *args: Any, **kwargs: Any) -> tuple:
        if not self.run.samples:
            self._is_rollout = False  # not earlier: verl builds no actor without a rollout
            return SimpleNamespace(), None
        rollout, manager = super()._build_rollout(*args, **kwargs)
        if dist.get_rank() % self.run.rollout.tp == 0:
            self.preemptions = getattr(rollout.inference_engine, "preemptions", None)  # row rollout.engine
        if isinstance(manager, RecipeShardingManager):
            manager.run_spec = self.run
        return rollout, manager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def prove_patches(self) -> dict[str, Any]:
        """Return digest and intent of the patches, the states of all rows, and `error`: None if all rows are active.

        digest, intent: of patching/engine.py. cpu_s: CPU seconds of this process so far, which are those of its start.

        The call is not blocking: the controller gets one reference per worker and can name a worker without a proof.
        """
        patches, error = engine.current_engine(), None
        try:
            patches.verify("worker", () if self.run.samples else _ENGINE_PACKAGES)
        except engine.PatchError as refused:
            error = str(refused)
        return {
            "rank": dist.get_rank(),
            "where": f"pid {os.getpid()} on {socket.gethostname()}",
            "digest": patches.digest(),
            "intent": patches.intent(),
            "status": patches.status(),
            "error": error,
            "cpu_s": time.process_time(),
        }

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate responses with verl; a validation's seconds and moves are not counted in the step."""
        with counters.discarded_counters() if prompts.meta_info.get("validate") else nullcontext():
            return super().generate_sequences(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_rollout(self, keep_awake: bool, check_seed: int | None) -> None:
        """Set how generate_sequences behaves until end_rollout.

        keep_awake: the engine does not sleep between calls; check_seed: the first call also samples for the check.
        """
        self.rollout.check_seed = check_seed
        if keep_awake and isinstance(self.sharding_manager, RecipeShardingManager):
            self.sharding_manager.keep_awake()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> CheckedSample | None:
        """Put the engine to sleep; return this replica's sample for the check, on its first rank, else None."""
        if isinstance(self.sharding_manager, RecipeShardingManager):
            self.sharding_manager.end_rollout()
        checked = self.rollout.__dict__.pop("checked_sample", None)
        return None if dist.get_rank() % self.config.rollout.tensor_model_parallel_size else checked

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto, *, planned: PlannedSplits | None = None) -> DataProto:
        """Compute log-probs with verl in phase old_log_prob, and note the difference from vLLM's for take_report.

        With recipe.train.routing_replay routed experts are recorded. planned: micro batches of the tensor cache's plan;
        None for verl's own (also in the next two methods).
        """
        recording = self.routing.recording() if self.routing is not None else nullcontext()
        stage = Stage(self._token_budget("log_prob"), planned)
        with context().phase("old_log_prob"), recording, current_stage.set(stage):
            found = super().compute_log_prob(data)
        if is_metrics_rank() and "rollout_log_probs" in data.batch.keys():
            rollout = data.batch["rollout_log_probs"]
            mask = data.batch["attention_mask"][:, -rollout.shape[1] :]
            self.log_prob_sums = rollout_correction.log_prob_sums(rollout, found.batch["old_log_probs"], mask)
        return found

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto, *, planned: PlannedSplits | None = None) -> DataProto:
        """Compute log-probs of the reference with verl in phase ref."""
        with context().phase("ref"), current_stage.set(Stage(self._token_budget("ref"), planned)):
            return super().compute_ref_log_prob(data)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_actor(self, data: DataProto, *, planned: PlannedSplits | None = None) -> DataProto:
        """Update with verl in phase update; inside PolicyUpdate with recipe.train.skip_old_log_prob or a correction.

        With recipe.train.routing_replay the update replays the recorded experts.
        """
        update = PolicyUpdate.from_run(self.run) if is_on("update.on_policy") else None
        self.wait_for_checkpoint()
        replaying = self.routing.replaying() if self.routing is not None else nullcontext()
        around = nullcontext() if update is None else update.update_context(data.batch)
        counts = MiniBatchCounts()
        stage = Stage(self._token_budget("update"), planned, counts)
        with context().phase("update"), replaying, current_stage.set(stage), around:
            output = super().update_actor(data)
            if counts.micro_batches:  # only with row update.mini_batches on
                counts.report(output.meta_info["metrics"])
        if update is not None and (update.skip or update.correction):  # else an earlier pass has noted them
            self.log_prob_sums = update.log_prob_sums()
        return output

    def _token_budget(self, stage: str) -> int | None:
        """Return the budget of `stage` if our rows make micro batches (step/batches/micro_batches.py), else None."""
        return token_budget(self.config, stage) if is_on("update.dynamic_batches") else None

    # ---- the same stages on tensors that stay in this process (recipe.tensor_cache)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate_cached(self, prompts: payloads.PromptIds) -> payloads.ResponseIds:
        """Call generate_sequences for this rank's prompts; keep the responses and return their lengths and ids."""
        padded = padded_prompts(prompts, dist.get_rank(), dist.get_world_size())
        with self._cached_batch().generating() as kept:
            self.generate_sequences(padded)
        return kept[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place_cached(self, placement: payloads.Placement) -> dict[str, float]:
        """Send responses once from the ranks that generated them to the train replicas that compute on them."""
        return self._cached_batch().place(placement, self.config, self.run.train)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log_prob_cached(self, send_back: bool) -> payloads.LogProbs | None:
        """Call compute_log_prob for this replica's samples; keep the log-probs, return what the trainer needs."""
        batch = self._cached_batch()
        data, mask = batch.inputs()
        if "rollout_log_probs" in batch.cache.names:
            data.batch["rollout_log_probs"] = batch.padded_responses("rollout_log_probs")
        found = self.compute_log_prob(data, planned=batch.stage_splits(self.config, "log_prob"))
        return batch.keep_log_probs("old_log_probs", found, mask, send_back)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ref_log_prob_cached(self, send_back: bool) -> payloads.LogProbs | None:
        """Call compute_ref_log_prob for this replica's samples; keep the log-probs, return them with `send_back`."""
        batch = self._cached_batch()
        data, mask = batch.inputs()
        found = self.compute_ref_log_prob(data, planned=batch.stage_splits(self.config, "ref"))
        return batch.keep_log_probs("ref_log_prob", found, mask, send_back)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_cached(self, advantages: payloads.Advantages) -> dict[str, Any] | None:
        """Call update_actor for this replica's samples; return verl's metrics on the replica's reporting rank."""
        batch = self._cached_batch()
        output = self.update_actor(batch.update_batch(advantages), planned=batch.stage_splits(self.config, "update"))
        return output.meta_info["metrics"] if is_metrics_rank() else None

    def _cached_batch(self) -> CachedBatch:
        """Return the cached batch of this process, which verl's actor and reference workers share."""
        if cached_batch.value is None:
            cached_batch.value = CachedBatch(device_type(self.recipe.platform), context().ledger)
        return cached_batch.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_profile(self, step: int, folder: str) -> None:
        """Trace phases of `step` into `folder` until take_report, on ranks of recipe.profile (worker/profile.py)."""
        if dist.get_rank() in self.recipe.profile.ranks:
            from verl_patches.worker.profile import PhaseProfiler

            context().profiler = PhaseProfiler(self.recipe, step, dist.get_rank(), Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_report(self) -> dict[str, Any]:
        """End a step: drop its cached tensors, if it had no update; return the counters since the last call.

        seconds: {phase: s}; sync: one dict per weight sync; log_prob_sums: of the last update, None on ranks that do
        not report; memory: the ledger's records, None without one; moves: between host and device; usage:
        counters.host_memory; emulated: calls of the emulated device since the process started, None on a real one;
        preempted: responses of this replica that vLLM preempted, None on ranks other than its first; skipped: steps of
        actor and critic (step_guard.take_all_skips);
        routing_replay, profile: results of RoutingReplay.end_step, PhaseProfiler.take_files; None where the feature is
        off.
        """
        if cached_batch.value is not None:
            cached_batch.value.cache.close()
        sums, self.log_prob_sums = self.log_prob_sums, None
        emulator = load_emulation(self.recipe.platform)
        profiler, context().profiler = context().profiler, None
        resharder, ledger = getattr(getattr(self, "sharding_manager", None), "resharder", None), context().ledger
        return {
            "seconds": counters.take_seconds(),
            "sync": resharder.take_reports() if resharder else [],
            "log_prob_sums": sums,
            "memory": {"rank": ledger.rank, **ledger.take()} if ledger else None,
            "moves": counters.take_moves(),
            "usage": counters.host_memory(),
            "routing_replay": self.routing.end_step() if self.routing is not None else None,
            "expert_load": self.expert_load.take() if self.expert_load is not None else None,
            "preempted": self.preemptions.take() if self.preemptions is not None else None,
            "skipped": take_all_skips(context().step_guards),
            "profile": profiler.take_files() if profiler is not None else None,
            "emulated": emulator and emulator.device_usage(self.recipe.platform),
        }
