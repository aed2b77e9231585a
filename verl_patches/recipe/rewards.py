"""The entries of recipe.rewards: the schema of one, and the parts of a run's reward. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from verl_patches.errors import ConfigError
from verl_patches.recipe.schema import one_of
from verl_patches.values import Count, Positive, Text, types_of, unknown_key, value_faults

FORMAT_WEIGHT, MAX_FORMAT_WEIGHT = 0.1, 0.5  # of a wrong answer in the right form: its score, and the most
CPU_LIMIT_S = 1.0  # of a comparison of two answers
SHORT_FORM = "custom_reward_function"
TAKES = {  # keys of an entry beside name and weight
    "maths": ("format_weight", "cpu_limit_s"),
    "by_source": ("format_weight", "cpu_limit_s"),
    "learnable": (),
    "format": (),
    "length": ("buffer_tokens",),
    "reward_model": ("path",),
    "python": ("path", "function", "kwargs"),
    "data_source": (),
}


@dataclass
class Reward:
    """One part. The reward of a response is the sum of weight x score over the parts (rewards/manager.py).

    name: maths compares the last \\boxed{} of a response with the gold answer; learnable is the task of smoke --learn;
    by_source is learnable for rows of that task and maths for all others; format is 1 for a closed last \\boxed{} that
    is not empty, else 0; length is DAPO's penalty near the length limit, -1 at the limit (arXiv:2503.14476, eq. 13);
    reward_model is a model's score of prompt and response, at the last token; python calls a function with verl's
    compute_score contract; data_source is verl's own score by a row's data_source.
    weight: factor of the part's score. 0 only reports the part's mean.
    format_weight: of maths and by_source: score of a wrong answer in the right form.
    cpu_limit_s: of maths and by_source: CPU time of a comparison, which is wrong where it takes more.
    buffer_tokens: of length: the penalty begins this many tokens before data.max_response_length and falls linearly;
    null is a fifth of it, DAPO's share.
    path: of python: the file; of reward_model: a folder with a score head, as a checkpoint of algo=rm.
    function: of python: the function in the file.
    kwargs: of python: keyword arguments of the function.
    """

    name: Annotated[str, one_of(*TAKES)]
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    format_weight: Annotated[float, Field(ge=0, le=MAX_FORMAT_WEIGHT)] = FORMAT_WEIGHT
    cpu_limit_s: Positive = CPU_LIMIT_S
    buffer_tokens: Count | None = None
    path: Text | None = None
    function: Text = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)

    def buffer_of(self, longest: int) -> int:
        """Tokens over which the penalty of `length` falls, for responses of at most `longest` tokens."""
        return self.buffer_tokens or max(longest // 5, 1)


class Part(NamedTuple):
    """An entry; `where` is its key in the configuration, `label` its name in metrics."""

    where: str
    label: str
    entry: Reward

    def __str__(self) -> str:
        return f"{self.where} ({self.entry.name})"


def reward_parts(given: Sequence[Mapping[str, Any]] | None, short: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of a reward in order; without any key that names one, verl's own score by data source.

    `given`: recipe.rewards. `short`: verl's section custom_reward_function. Raises ConfigError that lists every fault
    of the entries, or where both name a reward.
    """
    if given is None:
        if not short.get("path"):
            return (Part("data.reward_fn_key", "data_source", Reward("data_source")),)
        kwargs, function = dict(short.get("reward_kwargs") or {}), short.get("name") or "compute_score"
        return (Part(SHORT_FORM, "python", Reward("python", path=short["path"], function=function, kwargs=kwargs)),)
    entries = {f"recipe.rewards[{number}]": entry for number, entry in enumerate(given)}
    faults = [fault for where, entry in entries.items() for fault in _faults(where, entry)]
    if short.get("path"):
        faults.append(
            f"{SHORT_FORM}.path and recipe.rewards are both given; expected one, as the first is the short form of one "
            f"entry of name python: set {SHORT_FORM}.path=null, or recipe.rewards=null"
        )
    if faults:
        raise ConfigError("Invalid rewards:\n  " + "\n  ".join(faults))
    counts = Counter(entry["name"] for entry in entries.values())
    labels = [f"{e['name']}_{n}" if counts[e["name"]] > 1 else e["name"] for n, e in enumerate(entries.values())]
    return tuple(Part(where, label, Reward(**entries[where])) for where, label in zip(entries, labels, strict=True))


def _faults(where: str, entry: Mapping[str, Any]) -> list[str]:
    """What is wrong with one entry: its name, a value, or a key that its name does not take."""
    types = {f"{where}.{key}": kind for key, kind in types_of(Reward).items()}
    faults = value_faults(types, {f"{where}.{key}": value for key, value in {"name": None, **entry}.items()})
    if any(fault.startswith(f"{where}.name ") for fault in faults):
        return faults
    known = dict.fromkeys(("name", "weight", *TAKES[entry["name"]]))
    hint = f"{entry['name']} takes {', '.join(known)}"
    faults += [f"{where}: {unknown_key(key, known, hint)}" for key in entry if key not in known]
    files = {"python": "the Python file that defines the function"}
    files["reward_model"] = "a checkpoint of algo=rm, or another folder with score.weight"
    if entry["name"] in files and entry.get("path") is None:
        faults.append(f"{where}.path is missing; expected {files[entry['name']]}")
    return faults
