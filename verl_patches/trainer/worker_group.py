"""One step as verl's trainer runs it: the calls of RayPPOTrainer.fit() to its workers, in their order.

    generate_sequences      responses of the data (recipe.objective), of a recording, or vLLM's, of several batches with
                            recipe.keep_groups (keep_groups.py); vLLM's are recorded, with their scores at the update,
                            and every N steps sampled once more for the check
    compute_log_prob        left out with recipe.train.skip_old_log_prob
    compute_ref_log_prob
    compute_values          of a run with a critic, as update_critic; the trainer's batch, with the tensor cache too
    update_critic
    update_actor
    end_step                what the step leaves for its record

With recipe.tensor_cache these calls go to batches/cached_step.py, which sends the workers what they do not have yet;
without it they are verl's own. worker/recipe_worker.py is the other end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from verl import DataProto

from verl_patches.batches.cached_step import SAMPLE, TensorCacheStages
from verl_patches.layout.phases import VALIDATE
from verl_patches.log_probs.sampled_check import SampledCheck
from verl_patches.log_probs.truth_check import not_compared
from verl_patches.objectives.advantages import given_responses
from verl_patches.patching.engine import is_on
from verl_patches.replay.recording import find_recording, load_step, save_scores, save_step
from verl_patches.rewards.parts import METRIC, part_means
from verl_patches.spec import run_of
from verl_patches.trainer.keep_groups import KeptGroups
from verl_patches.watch import heartbeat


class RecipeWorkerGroup:
    """verl's worker group `group` for fit(); calls that are not of a step go through.

    actor: the group of the actor, for that of a separate reference or of the critic. on_call(step, name) is called
    before each stage; responses are recorded below `record_to`, and traces of recipe.profile in `profile_to`, where
    given. `lengths`: tokens of each sequence of this step's update, None before it. `step` is the trainer's; a resumed
    run goes on.
    """

    def __init__(
        self,
        group: Any,
        trainer: Any,
        on_call: Callable[[int, str], None],
        record_to: Path | None = None,
        actor: RecipeWorkerGroup | None = None,
        profile_to: Path | None = None,
    ):
        run = run_of(trainer.config)
        recipe = run.recipe
        self._group, self._trainer, self._on_call, self._actor, self._step = group, trainer, on_call, actor, 0
        self._record_to, self._replay_from = record_to, find_recording(recipe.rollout.replay)
        self._scores_to: Path | None = None  # from the rollout of a recorded step to its first update
        self._profile_to, self._profiled = profile_to, frozenset(recipe.profile.steps or ())
        self.lengths: list[int] | None = None
        self._fixed_data, self._trains_actor = None if run.samples else recipe.objective.name, run.trains_actor
        self._rewards: dict[str, float] | None = None  # means of the parts of this step's reward
        self._skip_old_log_prob = recipe.train.skip_old_log_prob
        self.cache: TensorCacheStages | None = None
        if recipe.tensor_cache.enabled and is_on("update.tensor_cache"):
            self.cache = TensorCacheStages.of(trainer, group, actor and actor.cache)
        self._stages = self.cache or group
        self.kept_groups: KeptGroups | None = None
        if recipe.keep_groups.metric is not None and actor is None:
            self.kept_groups = KeptGroups(trainer, group, lambda name: on_call(self.step, name))
        self.sampled_check: SampledCheck | None = None
        if recipe.logprob_check.every is not None and not not_compared(run):
            self.sampled_check = SampledCheck(group, trainer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    @property
    def step(self) -> int:
        """The step that runs now, or ran last."""
        return self._actor.step if self._actor else self._step

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The responses of this step. Validation and REMAX's greedy baseline are verl's own calls."""
        if prompts.meta_info.get("validate"):
            heartbeat.here().controller_is_at(self._trainer.global_steps, VALIDATE)
            return self._group.generate_sequences(prompts)
        if not prompts.meta_info.get("do_sample", True):
            return self._group.generate_sequences(prompts)
        self._step = self._trainer.global_steps
        self._on_call(self.step, "reward" if self._fixed_data else "generate_sequences")
        self.lengths = self._rewards = None
        if self._profile_to is not None and self.step in self._profiled:
            self._group.begin_profile(self.step, str(self._profile_to))
        if self._fixed_data is not None:
            width, pad_id = self._trainer.config.data.max_response_length, self._trainer.tokenizer.pad_token_id
            tensors = given_responses(prompts, self._fixed_data, width, pad_id)
            return DataProto.from_dict(tensors=tensors, meta_info=dict(prompts.meta_info))
        if self._replay_from is not None:
            tensors = load_step(self._replay_from, self.step, prompts.batch["input_ids"])
            return DataProto.from_dict(tensors=tensors, meta_info=dict(prompts.meta_info))
        stages = self.kept_groups or self._stages
        if self.sampled_check is not None:
            output = self.sampled_check.generate(stages, prompts, self.step)
        else:
            output = stages.generate_sequences(prompts)
        if self._record_to is not None:
            save_step(self._record_to, self.step, {k: v for k, v in output.batch.items() if k != SAMPLE})
            output.batch[SAMPLE] = torch.arange(len(output))
            self._scores_to = self._record_to
        self._on_call(self.step, "reward")
        return output

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys [B, S_response]; NaN where the update takes its own, so that no use is unseen."""
        if self._skip_old_log_prob:
            nothing = torch.full(batch.batch["responses"].shape, math.nan)
            return DataProto.from_dict(tensors={"old_log_probs": nothing, "entropys": nothing.clone()})
        self._on_call(self.step, "compute_log_prob")
        return self._stages.compute_log_prob(batch)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob [B, S_response], or nothing where the tensor cache holds it."""
        self._on_call(self.step, "compute_ref_log_prob")
        return self._stages.compute_ref_log_prob(batch)

    def update_actor(self, batch: DataProto) -> DataProto:
        """verl's metrics of the update; none where the critic alone is trained."""
        self._record_scores(batch)
        self.lengths, self._rewards = batch.meta_info.get("global_token_num"), part_means(batch.non_tensor_batch)
        if not self._trains_actor:
            return DataProto(meta_info={"metrics": {}})
        self._on_call(self.step, "update_actor")
        self._wait_for_checkpoint()
        if self._skip_old_log_prob:
            batch.batch.pop("old_log_probs")
        return self._stages.update_actor(batch)

    def compute_values(self, batch: DataProto) -> DataProto:
        """values [B, S_response], of the critic's group."""
        self._on_call(self.step, "compute_values")
        return self._group.compute_values(batch)

    def update_critic(self, batch: DataProto) -> DataProto:
        """verl's metrics of the critic's update."""
        self._actor._record_scores(batch)  # before critic_warmup there is no update of the actor
        self._on_call(self.step, "update_critic")
        self._wait_for_checkpoint()
        self._actor._rewards = part_means(batch.non_tensor_batch)  # the actor has no update in trainer.critic_warmup
        return self._group.update_critic(batch)

    def _wait_for_checkpoint(self) -> None:
        checkpoints = getattr(self._trainer, "recipe_checkpoints", None)  # none with row checkpoint.save off
        if checkpoints is not None:
            checkpoints.wait_before_update()

    def _record_scores(self, batch: DataProto) -> None:
        """Once a step, as verl's trainer has them for its update."""
        if self._scores_to is not None:
            columns = {k: v for k, v in batch.non_tensor_batch.items() if k == "uid" or k.startswith(METRIC)}
            scores = batch.batch["token_level_scores"].sum(-1)
            save_scores(self._scores_to, self.step, batch.batch[SAMPLE], scores, columns)
            self._scores_to = None

    def end_step(self) -> dict[str, Any]:
        """{rewards: means of the parts}; tensor_cache, logprob_check, keep_groups: reports, where the run has it."""
        facts: dict[str, Any] = {"rewards": self._rewards}
        if self.kept_groups is not None:
            facts["keep_groups"] = self.kept_groups.report
        if self.cache is not None:
            facts["tensor_cache"] = self.cache.end_step()
        if self.sampled_check is not None:
            facts["logprob_check"] = self.sampled_check.report
        return facts
