"""verl's sharding manager between training and rollout: weight sync on entering, sleep on leaving."""

from __future__ import annotations

from typing import Any

import torch

from verl_patches.memory.counters import timed
from verl_patches.patching.engine import is_on
from verl_patches.reshard.rank_errors import catch_errors, raise_on_any_rank
from verl_patches.reshard.weight_sync import Settings, WorkerReshard
from verl_patches.worker.context import context


class RecipeShardingManager:
    """Methods over those of verl's MegatronVLLMShardingManager (row update.sharding_manager).

    `settings` and `sync_enabled` (recipe.weight_sync.enabled) come from the worker, in `_build_rollout`; without
    settings the sync is verl's own. Where `sync_enabled` is false only the first entry syncs: the control run that
    shows what learning without weight sync looks like.
    """

    settings: Settings | None = None
    sync_enabled = True
    synced_once = False
    resharder: WorkerReshard | None = None

    def __enter__(self) -> None:
        """Weights of the rollout are training's afterwards.

        Where our schedule moves memory the KV cache is awake too, on both lines, after training weights have left; in
        verl's own order it is woken where verl does it: here at 54c9b736, in the worker at 0.4.0, after its offload.
        """
        if self.synced_once and not self.sync_enabled:
            self.inference_engine.wake_up(tags=["weights"])
        elif self.settings is not None and is_on("reshard.direct"):
            with timed("reshard"):
                self._sync()
        else:
            with timed("reshard"):
                super().__enter__()  # does not say that every weight was written: nothing proves it
        self.synced_once = True
        if context().scheduler is not None or (self.settings is not None and self.settings.line == "a3"):
            self.inference_engine.wake_up(tags=["kv_cache"])

    def _sync(self) -> None:
        """The resharder in place of verl's per-tensor generator. ReshardError on every rank, or on none."""
        engine, device = self.inference_engine, next(self.actor_module[0].parameters()).device

        def prepare():
            from verl.utils.vllm_utils import patch_vllm_moe_model_weight_loader

            engine.wake_up(tags=["weights"])
            patch_vllm_moe_model_weight_loader(_model_of(engine))
            if self.resharder is None:
                self.resharder = WorkerReshard(self.settings, self.actor_module, self.model_config, device)

        raise_on_any_rank(catch_errors(prepare), None, device, "the rollout engine is not ready for weights")
        report = self.resharder.sync(_model_of(engine))
        context().look(report.peak_extra_bytes)
        engine.weights_written(last=not self.sync_enabled)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """The rollout engine sleeps. Where our schedule moves memory, verl's empty_cache is left out."""
        if context().scheduler is None:
            super().__exit__(exc_type, exc_value, traceback)
            return
        self.inference_engine.sleep(level=1)
        for chunk in self.actor_module:
            chunk.train()

    def postprocess_data(self, data: Any) -> Any:
        """verl's, after which this rank's responses stay here if the tensor cache asked for them."""
        output = super().postprocess_data(data)
        batch = context().batch
        return output if batch is None else batch.keep_responses(output)


def _model_of(engine: Any) -> torch.nn.Module:
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
