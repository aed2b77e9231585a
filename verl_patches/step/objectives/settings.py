"""Check configuration and data columns of objectives on fixed data. No torch here.

verl's update has the gradient of a loss L if advantages are -B dL/dlogp (step/objectives/advantages.py), each of the B
responses has weight 1/B, and its loss has no other term: `objective_faults` names settings that contradict that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from verl_patches.spec import VALUE_OBJECTIVES, RunSpec
from verl_patches.values import Share, Text


class _Message(TypedDict):
    role: str
    content: str | None


class _TextMessage(TypedDict):
    role: str
    content: str


def _list_type(kind: Any, description: str) -> Any:
    return Annotated[list[kind], Field(min_length=1, description=f"{description}, not empty")]


TEXT_MESSAGES = _list_type(_TextMessage, "a list of messages with text as role and content")  # prompts of RL
_MESSAGES = _list_type(_Message, "a list of messages with role and content")
_PROMPT = {"prompt": _MESSAGES}
_PAIR = {**_PROMPT, "chosen": Text, "rejected": Text}
_MARKS = _list_type(Share | bool, "a list of true or false, or of numbers from 0 to 1")
# objective -> columns of a data file and their types, with alternatives
COLUMNS: dict[str, tuple[dict[str, Any], ...]] = {
    "sft": ({**_PROMPT, "response": Text}, {"messages": _MESSAGES}, {"text": Text}),
    "dpo": (_PAIR,),
    "ipo": (_PAIR,),
    "rm": (_PAIR,),
    "kto": ({**_PROMPT, "response": Text, "label": bool},),
    "prm": ({**_PROMPT, "steps": _list_type(Text, "a list of texts"), "labels": _MARKS},),
}
RESPONSES_PER_PROMPT = {"sft": 1, "prm": 1, "dpo": 2, "ipo": 2, "kto": 2, "rm": 2}  # in a batch
REFERENCE_OBJECTIVES = ("dpo", "ipo", "kto")
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def file_columns(objective: str, names: Collection[str]) -> dict[str, Any]:
    """Return the {column: type} by which a file with these columns is read; the first way if none is complete."""
    column_sets = COLUMNS[objective]
    found = next((columns for columns in column_sets if columns.keys() <= {*names}), column_sets[0])
    return {**found, "tools": str | None} if "tools" in names else found


def objective_faults(run: RunSpec) -> Iterator[str]:
    """Yield reasons why a configuration does not train recipe.objective exactly, one sentence each; none for rl."""
    objective = run.recipe.objective
    if run.samples:
        return
    fact = f"recipe.objective.name is {objective.name}, but"
    if objective.label_smoothing and objective.name != "dpo":
        yield f"{fact} recipe.objective.label_smoothing is {objective.label_smoothing}: only dpo has it; set 0"
    if run.verl.data.custom_cls.path is None:
        yield f"{fact} data.custom_cls.path is null: verl's own dataset gives no responses; use algo={objective.name}"
    if objective.name == "kto" and run.verl.data.train_batch_size < 2:
        yield (
            f"{fact} data.train_batch_size is 1: KTO's KL estimate pairs a prompt with another row's response; set 2 "
            "or more"
        )
    for key, (expected, why) in _expected_settings(run, objective.name).items():
        if (found := OmegaConf.select(run.verl, key)) != expected:
            shown = str(expected).lower() if isinstance(expected, bool) else expected
            yield f"{fact} {key} is {found}: {why}; set {shown}"
    if run.verl.trainer.test_freq > 0 or run.verl.trainer.val_before_train:
        yield f"{fact} validation would sample; set trainer.test_freq=-1 and trainer.val_before_train=false"


def _expected_settings(run: RunSpec, name: str) -> dict[str, tuple[Any, str]]:
    """Return {key: (expected value, reason)} for an objective."""
    trained = "critic" if name in VALUE_OBJECTIVES else _ACTOR
    term, sampled = "the loss has no other term", "no response is sampled"
    whole = "the step must be one optimizer step over the whole batch"
    equally = "only then each response weighs equally, whatever its length and micro batch"
    expected = {
        f"{_ROLLOUT}.n": (RESPONSES_PER_PROMPT[name], "a prompt has that many responses in a batch"),
        f"{trained}.loss_agg_mode": ("seq-mean-token-sum", equally),
        f"{trained}.ppo_mini_batch_size": (run.verl.data.train_batch_size, whole),
        f"{trained}.ppo_epochs": (1, whole),
        f"{_ACTOR}.entropy_coeff": (0, term),
        f"{_ACTOR}.use_kl_loss": (False, "the loss has no reference model"),
        "algorithm.adv_estimator": ("grpo", "other estimators would need a critic"),
        "algorithm.use_kl_in_reward": (False, term),
        "data.prompt_key": ("prompt", "the column of fixed data has this name"),
        "recipe.tensor_cache.enabled": (False, "the tensor cache starts with a rollout"),
        "recipe.train.routing_replay": (None, sampled),
        "recipe.rollout_correction.rollout_is": (None, sampled),
        "recipe.rollout_correction.rollout_rs": (None, sampled),
        "recipe.logprob_check.action": ("off", sampled),
        "recipe.rollout.replay": (None, sampled),
        "recipe.filter_groups.metric": (None, sampled),
        "recipe.rewards": ([], "fixed responses have no reward"),
    }
    if name in REFERENCE_OBJECTIVES:
        expected |= {
            f"{_ACTOR}.use_kl_loss": (True, "the loss needs the reference's log-probs"),
            f"{_ACTOR}.kl_loss_coef": (0, term),
            f"{_ACTOR}.kl_loss_type": ("kl", "other KL estimators may overflow, and 0 x inf is NaN"),
            "recipe.train.skip_old_log_prob": (False, "the loss needs the policy's log-probs before the update"),
        }
    if name in VALUE_OBJECTIVES:
        expected["algorithm.adv_estimator"] = "gae", "the run trains a value model"
    else:
        expected["trainer.critic_warmup"] = 0, "each step has an update"
    return expected
