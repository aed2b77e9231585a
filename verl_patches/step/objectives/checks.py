"""Check an algorithm's settings: its advantage estimator, its objective, its critic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_patches.errors import Check, either
from verl_patches.layout.inventory import read_model_shape
from verl_patches.model.checks import value_model_differences
from verl_patches.spec import RunSpec
from verl_patches.step.objectives import settings

_ROLLOUT = "actor_rollout_ref.rollout"
_GROUP_ESTIMATORS = ("grpo", "grpo_passk", "reinforce_plus_plus_baseline", "rloo")  # advantage estimators over groups


def estimator_checks(run: RunSpec) -> Iterator[Check]:
    """Check that a prompt has as many responses as the advantage estimator and the validation need."""
    if not run.samples:
        return
    estimator, rollout = run.verl.algorithm.adv_estimator, run.verl.actor_rollout_ref.rollout
    detail = f"{estimator}, {rollout.n} response(s) a prompt"
    fault = (
        f"algorithm.adv_estimator is {estimator}, which compares the responses of one prompt, and {_ROLLOUT}.n is 1; "
        "expected 2 or more, or algo=reinforce_plus_plus or remax, which need no group"
    )
    yield either("advantages", estimator not in _GROUP_ESTIMATORS or rollout.n > 1, detail, fault)
    val, trainer = rollout.val_kwargs, run.verl.trainer
    if run.validates:
        detail = f"{val.n} response(s) a prompt of data.val_files"
        detail += f", every {trainer.test_freq} steps" if trainer.test_freq > 0 else ", before the first step only"
        fault = f"{_ROLLOUT}.val_kwargs.n is {val.n}, but greedy responses are equal; set do_sample=true, or n=1"
        yield either("validation", val.n == 1 or val.do_sample, detail, fault)


def objective_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the update has the gradient of recipe.objective; skip runs that sample responses."""
    if run.samples:
        return
    name = run.recipe.objective.name
    faults = [
        f"recipe.objective.name is {name}, but row {row} is off; remove -{row} from recipe.patches"
        for row in ("advantage.objective", "update.fit_as_run", "update.recipe_worker", "update.on_policy")
        if row not in run.rows
    ]
    faults = [*settings.objective_faults(run), *faults]
    yield from (Check("objective", False, fault) for fault in faults)
    if not faults:
        yield Check("objective", True, f"{name}; no rollout: fixed data")


def critic_checks(run: RunSpec) -> Iterator[Check]:
    """Check that a critic's passes support its settings, and that its model matches; skip without a critic."""
    critic, actor = run.critic, run.verl.actor_rollout_ref
    if critic is None:
        return
    faults: list[str] = []
    if critic.use_dynamic_bsz:
        faults.append("critic.use_dynamic_bsz is true, but no critic here supports it; set it false")
    if critic.rollout_n != actor.rollout.n:
        faults.append(f"critic.rollout_n is {critic.rollout_n}; expected {_ROLLOUT}.n, {actor.rollout.n}")
    if critic.megatron.use_dist_checkpointing or not critic.load_weight:
        faults.append("critic.load_weight must be true and critic.megatron.use_dist_checkpointing false")
    file = Path(critic.model.path) / "config.json"
    if file.is_file() and critic.model.path != actor.model.path:
        if unlike := value_model_differences(run, read_model_shape(file), file.parent):
            faults.append(f"critic.model.path has another model than the actor's: {unlike}; give one of equal sizes")
    if not {"update.recipe_critic", "update.recipe_worker"} <= run.rows:
        faults.append(
            "row update.recipe_critic or update.recipe_worker is off, so verl's own critic would train; remove it from "
            "recipe.patches"
        )
    yield either("critic", not faults, f"values by a head on {critic.model.path}", "; ".join(faults))
