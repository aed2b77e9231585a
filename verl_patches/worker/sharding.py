"""Switch verl's worker between training and rollout: sync weights on entry, put the engine to sleep on exit."""

from __future__ import annotations

import logging
from typing import Any

from verl_patches.memory.counters import time_phase
from verl_patches.memory.measure import vllm_worker
from verl_patches.patching.engine import is_on
from verl_patches.reshard.rank_errors import catch_errors, raise_on_any_rank
from verl_patches.reshard.weight_sync import WorkerReshard
from verl_patches.spec import RunSpec
from verl_patches.step.batches.cached_batch import cached_batch
from verl_patches.step.replay.sample_seeds import SEEDS
from verl_patches.worker import Upstream
from verl_patches.worker.context import context

log = logging.getLogger(__name__)


class RecipeShardingManager(Upstream):
    """Override methods of verl's MegatronVLLMShardingManager (row update.sharding_manager).

    The worker sets `run_spec` in `_build_rollout`; without it the sync is verl's own. If recipe.weight_sync.enabled is
    false only the first entry syncs: a control run, whose rollout stays old.
    Between `keep_awake` and `end_rollout` the engine does not sleep; `awake`: it was kept so, with the step's weights.
    """

    run_spec: RunSpec | None = None
    synced_once = keeps_awake = awake = False
    resharder: WorkerReshard | None = None

    def __enter__(self) -> None:
        """Sync the weights into the rollout engine, and wake its KV cache.

        With our memory schedule this method wakes the KV cache on both lines, after training weights were offloaded. In
        verl's own order verl wakes it: in this method at 54c9b736, in the worker at 0.4.0.
        """
        if self.awake:
            return
        run = self.run_spec
        if self.synced_once and run is not None and not run.recipe.weight_sync.enabled:
            self.inference_engine.wake_up(tags=["weights"])
        else:
            with time_phase("reshard"):
                if run is not None and is_on("reshard.direct"):
                    self._sync(run)
                else:
                    super().__enter__()  # without mark_weights_written: nothing proves that every weight was written
        self.synced_once = True
        if context().scheduler is not None or (run is not None and run.line == "a3"):
            self.inference_engine.wake_up(tags=["kv_cache"])

    def _sync(self, run: RunSpec) -> None:
        """Sync with the resharder, not verl's per-tensor generator; ReshardError is raised on all ranks or on none."""
        engine, device = self.inference_engine, next(self.actor_module[0].parameters()).device

        def prepare():
            from verl.utils.vllm_utils import patch_vllm_moe_model_weight_loader

            engine.wake_up(tags=["weights"])
            patch_vllm_moe_model_weight_loader(vllm_worker(engine).model_runner.model)
            if self.resharder is None:
                self.resharder = WorkerReshard(run, self.actor_module, self.model_config, device)

        raise_on_any_rank(catch_errors(prepare), None, device, "the rollout engine could not be prepared")
        assert self.resharder is not None  # `prepare` has made it, or every rank has raised
        report = self.resharder.sync(vllm_worker(engine).model_runner.model)
        context().raise_peak(report.peak_extra_bytes)
        engine.mark_weights_written(last=not run.recipe.weight_sync.enabled)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """Put the rollout engine to sleep; with our memory schedule skip verl's empty_cache."""
        if self.keeps_awake and exc_type is None:
            self.awake = True
            return
        self.keeps_awake = self.awake = False
        try:
            if context().scheduler is None:
                super().__exit__(exc_type, exc_value, traceback)
                return
            self.inference_engine.sleep(level=1)
        except Exception:
            if exc_type is None:
                raise
            log.warning("rollout engine: sleep failed after another error", exc_info=True)  # that error is raised
        for chunk in self.actor_module:
            chunk.train()

    def keep_awake(self) -> None:
        """Keep the engine awake until end_rollout.

        It has no effect in verl's own memory order, where training weights are on the device before each entry.
        """
        self.keeps_awake = context().scheduler is not None

    def end_rollout(self) -> None:
        """Put the rollout engine to sleep, if it was kept awake."""
        self.keeps_awake = False
        if self.awake:
            self.__exit__(None, None, None)

    def preprocess_data(self, data: Any) -> Any:
        """Gather the prompts of this replica with verl, then give their seeds to the engine."""
        gathered = super().preprocess_data(data)
        if SEEDS in gathered.batch.keys():
            self.inference_engine.sample_seeds = gathered.batch.pop(SEEDS).tolist()
        return gathered

    def postprocess_data(self, data: Any) -> Any:
        """Postprocess with verl, then store this rank's responses in the tensor cache, if it is generating."""
        output = super().postprocess_data(data)
        batch = cached_batch.value
        return output if batch is None else batch.keep_responses(output)
