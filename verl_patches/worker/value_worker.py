"""Run one step of value models: these classes override methods of verl's CriticWorker and RewardModelWorker.

    call of the trainer       code here                                       memory phases (memory/schedule.py)
    compute_rm_score          verl's own, once for each reward model          rm_scores
    compute_values            verl's own                                      values
    update_critic             verl's own, with gradients of all ranks         update_critic
    save_checkpoint           checkpoint.py: the critic's part

The actor's worker, which verl makes first, sets up the process: groups, heartbeat, ledger, report. Rows
update.recipe_critic and reward.models install the classes.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf, open_dict
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register

from verl_patches.memory import counters
from verl_patches.memory.offload import Params
from verl_patches.memory.schedule import ACTOR, CRITIC
from verl_patches.model.megatron import DTYPES
from verl_patches.patching.engine import is_on
from verl_patches.rewards.parts import RM_SCORES
from verl_patches.spec import run_from_config
from verl_patches.step.batches.micro_batches import MiniBatchCounts, Stage, current_stage
from verl_patches.weights.run_folders import value_model_folder
from verl_patches.worker import Upstream
from verl_patches.worker.checkpoint import TrainingWorker
from verl_patches.worker.context import context
from verl_patches.worker.memory import TrainedModel, WorkerMemory
from verl_patches.worker.models import ARCHITECTURE, prepare_training


def _set_stage_recompute(config: Any) -> None:
    """Replace a list in `config`, of each stage's number of recomputed layers, by this stage's number (line a3)."""
    if is_on("update.engine_start"):
        from verl_patches.model.mindspeed.start import set_recomputed_layers

        set_recomputed_layers(config)


class RecipeCriticWorker(TrainingWorker):
    """Override methods of CriticWorker. The attribute of a feature that is off is None."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _set_stage_recompute(config)
        self.run = run_from_config(config)
        self.recipe, self.memory = self.run.recipe, WorkerMemory(config, self.run)
        if self.memory.scheduled:  # then verl's own calls must not move memory
            self._is_offload_param = self._is_offload_optimizer = False
        self.start_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build model and optimizer with verl, then register them with ledger and schedule."""
        if self.run.probes:
            return
        with counters.time_phase("start/models"):
            super().init_model()
        self.memory.register_worker(self, self.trained)

    def _build_critic_model_optimizer(self, *args: Any, **kwargs: Any) -> tuple:
        if is_on("model.train_dtype"):
            self.dtype = self.param_dtype = DTYPES[self.recipe.dtype]
        built = super()._build_critic_model_optimizer(*args, **kwargs)
        chunks, optimizer, hf_config, _ = built
        if is_on("update.critic_gradients"):
            reduce_gradients(chunks)
        self.trained = TrainedModel(chunks, optimizer, hf_config, CRITIC)
        self.step_guard = prepare_training(self.trained, self.memory)
        return built

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Return `values` [B, S_response], computed by verl in phase values, with 0 beyond a response.

        verl.workers.critic.megatron_critic.MegatronPPOCritic.compute_values of 54c9b736 returns one more value there,
        which GAE with lam below 1 would start from.
        """
        with context().phase("values"):
            output = super().compute_values(data)
        values = output.batch["values"]
        output.batch["values"] = values * data.batch["attention_mask"][:, -values.shape[1] :].to(values)
        return output

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """Update with verl in phase update_critic.

        Row update.skip_bad_steps adds critic/grad_norm, which 54c9b736 lacks.
        """
        self.wait_for_checkpoint()
        counts = MiniBatchCounts()
        with context().phase("update_critic"), current_stage.set(Stage(counts=counts)):
            output = super().update_critic(data)
            metrics = output.meta_info["metrics"]
            if counts.micro_batches:  # only with row update.mini_batches on
                counts.report(metrics)
        if self.step_guard is not None:
            metrics["critic/grad_norm"] = list(self.step_guard.norms)
        return output


class RecipeRewardModelWorker(Upstream):
    """Override methods of RewardModelWorker: hold the reward models of recipe.rewards, one at a time on the device.

    reward_models: verl's MegatronRewardModel of each, in the order of the entries.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _set_stage_recompute(config)
        self.run = run_from_config(config)
        self.recipe, self.memory = self.run.recipe, WorkerMemory(config, self.run)
        self.reward_models: list[Any] = []
        with open_dict(config):  # verl does not know HF's ...ForSequenceClassification
            OmegaConf.update(config, "model.override_config.model_config.architectures", [ARCHITECTURE])
            if self.memory.scheduled:  # then verl's own calls must not move memory
                config.megatron.param_offload = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model of each folder with verl, and offload it before the next is built."""
        if self.run.probes:
            return
        with counters.time_phase("start/models"):
            for entry in self.run.reward_models:
                assert entry.path is not None  # rewards/parts.py requires it
                self.config.model.path = str(value_model_folder(entry.path))
                super().init_model()
                self.reward_models.append(self.rm)
        self.memory.register_worker(self, None)

    def _build_rm_model(self, *args: Any, **kwargs: Any) -> tuple:
        if is_on("model.train_dtype"):
            self.dtype = self.param_dtype = DTYPES[self.recipe.dtype]
        built = super()._build_rm_model(*args, **kwargs)
        for chunk in built[0]:
            chunk.memory_groups = ACTOR._replace(params="reward_params")
        if self.memory.scheduled:
            Params(built[0]).offload()
        return built

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return `rm_scores` [B, M] fp32: each model's head output at the last token of the response.

        algo=rm trains the head so that this is the score of a response (step/objectives/dataset.py).
        """
        scores = []
        for model in self.reward_models:
            self.rm = model
            if (scheduler := context().scheduler) is not None:
                scheduler.add({"reward_params": Params(model.reward_model_module)})
            # verl replaces the attention mask in the batch that it gets, so each model gets a batch of its own
            read = data.select(["input_ids", "attention_mask", "position_ids", "responses"])
            with context().phase("rm_scores"):
                scores.append(super().compute_rm_score(read).batch["rm_scores"].sum(-1))
        return DataProto.from_dict({RM_SCORES: torch.stack(scores, -1)})


def reduce_gradients(chunks: Any) -> None:
    """Have Megatron's schedules reduce the gradients of `chunks` over ranks, as verl's actor does."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
