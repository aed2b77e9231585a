"""Call the workers in the order of one step, for verl's RayPPOTrainer.fit().

    fit() calls               calls of workers, without and with recipe.tensor_cache
    generate_sequences        [begin_rollout]         with recipe.filter_groups, and for recipe.logprob_check.every
                              generate_sequences      generate_cached, place_cached
                              [end_rollout; compute_log_prob of the check]
    compute_log_prob          compute_log_prob        log_prob_cached      none with recipe.train.skip_old_log_prob
    compute_ref_log_prob      compute_ref_log_prob    ref_log_prob_cached
    compute_values            compute_values          compute_values       only in a run with a critic
    update_critic             update_critic           update_critic        only in a run with a critic
    update_actor              update_actor            update_cached
    logger.log                take_report, by trainer/run.py, which ends the step

The worker classes (worker/recipe_worker.py, value_worker.py) have a method of each call's name. verl splits a DataProto
over ranks or train replicas and concatenates their answers; any other payload goes to all ranks. With the tensor cache
step/batches/cached_step.py makes the payloads, and makes verl's batch from the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from verl import DataProto

from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import VALIDATE
from verl_patches.patching.engine import is_on
from verl_patches.rewards.parts import REWARD_PREFIX, part_means, slowest_sample
from verl_patches.spec import run_from_config
from verl_patches.step.batches.cached_step import SAMPLE, CachedStep
from verl_patches.step.batches.filter_groups import FilterGroupsLoader
from verl_patches.step.log_probs.logprob_check import unchecked_reason
from verl_patches.step.log_probs.sampled_check import SampledCheck
from verl_patches.step.objectives.advantages import dataset_responses
from verl_patches.step.replay.recording import find_recording, load_step, save_scores, save_step
from verl_patches.step.replay.sample_seeds import SampleSeeds

_ROLLOUT_LOG_PROBS = "rollout_log_probs"


def _present_answers(answers: Sequence[Any]) -> list[Any]:
    """Return what the ranks that answer returned, in their order, to a call with the same payload for all ranks."""
    return [answer for answer in answers if answer is not None]


def _log_prob_deltas(tensors: Any) -> dict[str, torch.Tensor]:
    """Return {dlogp/mean, dlogp/max} of |dlogp| over each response, [B]; {} where log-probs are not in the batch."""
    if not {_ROLLOUT_LOG_PROBS, "old_log_probs"} <= {*tensors.keys()}:
        return {}
    delta = (tensors["old_log_probs"] - tensors[_ROLLOUT_LOG_PROBS]).abs()
    mask = tensors["attention_mask"][:, -delta.shape[1] :].bool()
    delta = torch.where(mask, delta, 0.0)
    return {"dlogp/mean": delta.sum(-1) / mask.sum(-1).clamp(min=1), "dlogp/max": delta.amax(-1)}


class RecipeWorkerGroup:
    """Wrap verl's worker group `group` for fit(); calls that do not belong to a step pass through unchanged.

    actor: the actor's group, given to the group of a separate reference or of the critic. on_call(step, name) is called
    before each stage. Responses are recorded below `record_to`, and traces of recipe.profile in `profile_to`, if given.
    `lengths`: tokens of each sequence of this step's update, None before it. `step` is the trainer's, so a resumed run
    continues its numbers.
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
        run = run_from_config(trainer.config)
        recipe = run.recipe
        self._group, self._trainer, self._on_call, self._actor, self._step = group, trainer, on_call, actor, 0
        self._record_to, replay = record_to, recipe.rollout.replay
        self._replay_from = None if replay is None else find_recording(replay)
        self._scores_to: Path | None = None  # from the rollout of a recorded step to its first update
        self._compares_log_probs = recipe.logprob_check.every is None and not unchecked_reason(run)
        self._profile_to, self._profiled = profile_to, frozenset(recipe.profile.steps or ())
        self.lengths: list[int] | None = None
        self._fixed_data, self._trains_actor = None if run.samples else recipe.objective.name, run.trains_actor
        self._rewards: dict[str, Any] = dict.fromkeys(("rewards", "slowest_sample"))  # facts of this step's rewards
        self._skip_old_log_prob = recipe.train.skip_old_log_prob
        seed = trainer.config.actor_rollout_ref.rollout.get("seed")
        self._seeds = None if seed is None else SampleSeeds(seed)
        self._rollout_log_probs: torch.Tensor | None = None  # by sample, from the rollout to the update
        self.cache: CachedStep | None = None
        if recipe.tensor_cache.enabled and is_on("update.tensor_cache"):
            self.cache = actor.cache if actor else CachedStep.from_trainer(trainer)
        self.filtered_groups: FilterGroupsLoader | None = None
        if recipe.filter_groups.metric is not None and actor is None:
            self.filtered_groups = FilterGroupsLoader(trainer, self._generate, lambda name: on_call(self.step, name))
        self.sampled_check: SampledCheck | None = None
        every = recipe.logprob_check.every
        if every is not None and not unchecked_reason(run):
            self.sampled_check = SampledCheck(trainer, every)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    @property
    def step(self) -> int:
        """Return the step that runs now, or ran last."""
        return self._actor.step if self._actor else self._step

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return the responses of this step; pass validation and ReMax's greedy baseline to verl's own call."""
        if prompts.meta_info.get("validate"):
            heartbeat.current_heartbeat().set_controller_step(self._trainer.global_steps, VALIDATE)
            return self._group.generate_sequences(self._seeded(prompts, self._trainer.global_steps))
        if not prompts.meta_info.get("do_sample", True):
            return self._group.generate_sequences(prompts)
        self._step = self._trainer.global_steps
        self._on_call(self.step, "reward" if self._fixed_data else "generate_sequences")
        self.lengths = self._rollout_log_probs = None
        self._rewards = dict.fromkeys(("rewards", "slowest_sample"))
        if self._profile_to is not None and self.step in self._profiled:
            self._group.begin_profile(self.step, str(self._profile_to))
        if self._fixed_data is not None:
            width, pad_id = self._trainer.config.data.max_response_length, self._trainer.tokenizer.pad_token_id
            tensors = dataset_responses(prompts, self._fixed_data, width, pad_id)
            return DataProto.from_dict(tensors=tensors, meta_info=dict(prompts.meta_info))
        if self._replay_from is not None:
            tensors = load_step(self._replay_from, self.step, prompts.batch["input_ids"])
            return DataProto.from_dict(tensors=tensors, meta_info=dict(prompts.meta_info))
        output = self._rollout(prompts)
        if self._record_to is not None:
            save_step(self._record_to, self.step, {k: v for k, v in output.batch.items() if k != SAMPLE})
            self._scores_to = self._record_to
        output.batch[SAMPLE] = torch.arange(len(output))
        if self._skip_old_log_prob:  # verl 0.4.0 would compare them with old log-probs, which are not in this batch
            self._rollout_log_probs = output.batch.pop(_ROLLOUT_LOG_PROBS, None)
        self._on_call(self.step, "reward")
        return output

    def _rollout(self, prompts: DataProto) -> DataProto:
        """Generate with vLLM: several batches for recipe.filter_groups, and at times samples of the log-prob check."""
        seed = None if self.sampled_check is None else self.sampled_check.seed(self.step)
        if seed is None and self.filtered_groups is None:
            return self._generate(prompts)
        self._group.begin_rollout(self.filtered_groups is not None, seed)
        output = (
            self._generate(prompts)
            if self.filtered_groups is None
            else self.filtered_groups.draw_filtered_groups(prompts)
        )
        checked = _present_answers(self._group.end_rollout())
        if self.sampled_check is not None and seed is not None:
            self.sampled_check.compare(checked, self._group.compute_log_prob)
        return output

    def _seeded(self, prompts: DataProto, step: int) -> DataProto:
        return prompts if self._seeds is None else self._seeds.seeded(prompts, step)

    def _generate(self, prompts: DataProto) -> DataProto:
        prompts = self._seeded(prompts, self.step)
        if self.cache is None:
            return self._group.generate_sequences(prompts)
        answers = _present_answers(self._group.generate_cached(self.cache.begin(prompts)))
        batch, placement = self.cache.responses(prompts, answers)
        self.cache.reports = _present_answers(self._group.place_cached(placement))
        return batch

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return old_log_probs and entropys [B, S_response]; only NaN entropys with recipe.train.skip_old_log_prob.

        The trainer then raises KeyError if it uses old_log_probs. verl's fit() needs entropys for one metric and drops
        the tensor; add_worker_metrics (step/log_probs/rollout_correction.py) leaves that metric out of the step's.
        """
        if self._skip_old_log_prob:
            return DataProto.from_dict(tensors={"entropys": torch.full(batch.batch["responses"].shape, math.nan)})
        self._on_call(self.step, "compute_log_prob")
        if self.cache is None:
            return self._group.compute_log_prob(batch)
        return self.cache.log_probs(batch, _present_answers(self._group.log_prob_cached(self.cache.send_back)))

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ref_log_prob [B, S_response]; nothing if the tensor cache holds it."""
        self._on_call(self.step, "compute_ref_log_prob")
        if self.cache is None:
            return self._group.compute_ref_log_prob(batch)
        return self.cache.ref_log_probs(batch, _present_answers(self._group.ref_log_prob_cached(self.cache.send_back)))

    def compute_values(self, batch: DataProto) -> DataProto:
        """Return values [B, S_response]; with the tensor cache too, the critic gets the trainer's batch."""
        self._on_call(self.step, "compute_values")
        return self._group.compute_values(batch)

    def update_critic(self, batch: DataProto) -> DataProto:
        """Update the critic; return verl's metrics."""
        assert self._actor is not None  # a critic's group is made with the actor's
        self._actor._record_rewards(batch)  # here too, as the actor has no update before critic_warmup
        self._on_call(self.step, "update_critic")
        self._wait_for_checkpoint()
        return self._group.update_critic(batch)

    def update_actor(self, batch: DataProto) -> DataProto:
        """Update the actor; return verl's metrics of the first replica, as in verl; {} without an actor to train."""
        self._record_rewards(batch)
        self.lengths = batch.meta_info.get("global_token_num")
        if not self._trains_actor:
            return DataProto(meta_info={"metrics": {}})
        self._on_call(self.step, "update_actor")
        self._wait_for_checkpoint()
        if self.cache is not None:
            metrics = _present_answers(self._group.update_cached(self.cache.advantages(batch)))
            return DataProto(meta_info={"metrics": metrics[0]})
        if self._rollout_log_probs is not None:
            batch.batch[_ROLLOUT_LOG_PROBS] = self._rollout_log_probs[batch.batch[SAMPLE]]
        return self._group.update_actor(batch)

    def _wait_for_checkpoint(self) -> None:
        checkpoints = getattr(self._trainer, "recipe_checkpoints", None)  # absent if row checkpoint.save is off
        if checkpoints is not None:
            checkpoints.wait_before_update()

    def _record_rewards(self, batch: DataProto) -> None:
        """Keep the means and the slowest sample, and save the scores of recorded responses once a step.

        verl's trainer passes the batch, with the reward's columns, to each of its updates.
        """
        slowest = slowest_sample(batch.non_tensor_batch)
        if slowest is not None and SAMPLE in batch.batch:
            slowest["sample"] = int(batch.batch[SAMPLE][slowest["sample"]])
        self._rewards = {"rewards": part_means(batch.non_tensor_batch), "slowest_sample": slowest}
        if self._scores_to is not None:
            facts, kept = batch.non_tensor_batch, ("uid", "data_source")
            columns = {k: v for k, v in facts.items() if k in kept or k.startswith(REWARD_PREFIX)}
            if "reward_model" in facts:
                columns["gold"] = [(row or {}).get("ground_truth") for row in facts["reward_model"]]
            if self._compares_log_probs:
                columns |= _log_prob_deltas(batch.batch)
            scores = batch.batch["token_level_scores"].sum(-1)
            save_scores(self._scores_to, self.step, batch.batch[SAMPLE], scores, columns)
            self._scores_to = None

    def end_step(self) -> dict[str, Any]:
        """Return rewards, slowest_sample, and the reports of tensor_cache, logprob_check and filter_groups."""
        facts = {**self._rewards}
        if self.filtered_groups is not None:
            facts["filter_groups"] = self.filtered_groups.report
        if self.cache is not None:
            facts["tensor_cache"] = self.cache.report()
        if self.sampled_check is not None:
            facts["logprob_check"] = self.sampled_check.report
        return facts
