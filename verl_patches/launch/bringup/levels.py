"""Train one node at each level, and find the part of a level that makes it fail, with few starts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_patches.patching.spec import LEVELS, PatchSpec
from verl_patches.run.resolve import CONFIGS_DIR
from verl_patches.spec import RunSpec
from verl_patches.values import leaves, read_yaml

STEPS, RESPONSE_TOKENS = 2, 512
MAX_STARTS = 8  # of a search for the part that fails
KINDS = ("graphs", "keys", "speed", "feature")  # in the order in which they are suspected; roles of rows at the end
_ASCEND = "recipe.rollout.ascend."
_EAGER_WORDS = tuple(
    f"{_ASCEND}{key}"
    for key in ("graphs=false", "view_optimize=true", "multistream_mla=false", "multistream_moe=false")
)
_JOINT_KEYS = {  # keys that hold only with each other
    **dict.fromkeys(("graphs", "view_optimize", "multistream_mla", "multistream_moe"), "graphs"),
    **dict.fromkeys(("scheduler", "prefix_caching", "chunked_prefill_for_mla"), "scheduler"),
}


def run_levels(run: RunSpec) -> tuple[str | None, ...]:
    """Return the levels that a run can have, the safest first; None, without a level, where there is no NPU."""
    return LEVELS if run.as_npu else (None,)


def level_words(run: RunSpec, level: str | None) -> list[str]:
    """Return the overrides of a start at a level.

    It makes STEPS steps with free routing, in which each response is compared, so sampling keeps the distribution.
    """
    section = "actor_rollout_ref"
    words = {
        "recipe.train.balanced_routing": "false",
        "recipe.rollout.balanced_routing": "false",
        f"{section}.rollout.ignore_eos": "false",
        f"{section}.rollout.temperature": "1.0",
        f"{section}.rollout.top_p": "1.0",
        f"{section}.rollout.top_k": "-1",
        "data.max_response_length": str(min(RESPONSE_TOKENS, run.verl.data.max_response_length)),
        "recipe.logprob_check.action": "stop",
        "recipe.logprob_check.every": "null",
        "trainer.total_training_steps": str(STEPS),
        "trainer.save_freq": "-1",
        "trainer.test_freq": "-1",
        "trainer.val_before_train": "false",
        "trainer.resume_mode": "disable",
    }
    if has_weights(run):
        words |= {f"{section}.actor.load_weight": "true", f"{section}.ref.load_weight": "true"}
    return [*([f"level={level}"] if level else []), *(f"{key}={value}" for key, value in words.items())]


def has_weights(run: RunSpec) -> bool:
    """Return whether the model's folder has weights, which a start at a level then loads."""
    return any(run.model_folder.glob("*.safetensors"))


class Suspect(NamedTuple):
    """Describe a part of a run that may be at fault, with the overrides and the rows that turn it off.

    kind: one of KINDS. stage: of the step, as the ids of rows begin. name: the row's id, or the keys.
    """

    kind: str
    stage: str
    name: str
    words: tuple[str, ...] = ()
    rows: frozenset[str] = frozenset()


def find_suspects(run: RunSpec, before: RunSpec | None, catalogue: Iterable[PatchSpec]) -> list[Suspect]:
    """Return what `run` has on and the run `before`, at a level that passed, has not; all that can be off without one.

    Rows of role correctness are never off, nor rows that one of these needs; rows that observe compare the log-probs.
    """
    found = [*_changed_keys(run, before)]
    if run.graphs and not (before and before.graphs):
        found = [
            Suspect("graphs", "rollout", f"{_ASCEND}graphs", _EAGER_WORDS),
            *(s for s in found if s.name != "graphs"),
        ]
    rows = {row.id: row for row in catalogue if row.id in run.rows}
    for row in rows.values():
        dependents = _dependents(row.id, rows)
        removable = all(rows[each].role in KINDS for each in dependents)
        if removable and not (before and row.id in before.rows):
            stage = row.id.partition(".")[0]
            found.append(Suspect(row.role, stage, row.id, rows=dependents))
    return sorted(found, key=lambda each: (KINDS.index(each.kind), each.stage, each.name))


def _changed_keys(run: RunSpec, before: RunSpec | None) -> list[Suspect]:
    """Return the keys of the run's level whose values differ from those of `before`, as suspects."""
    if before is None or run.recipe.level is None:
        return []
    changed: dict[str, list[str]] = {}
    if run.graphs and before.graphs and run.graph_sizes != before.graph_sizes:  # they follow the level in code
        changed["graph_batch_sizes"] = [f"{_ASCEND}graph_batch_sizes={[*before.graph_sizes]}".replace(" ", "")]
    for key, _ in leaves(read_yaml(CONFIGS_DIR / "level" / f"{run.recipe.level}.yaml")):
        value, earlier = OmegaConf.select(run.verl, key), OmegaConf.select(before.verl, key)
        if value != earlier and key != "recipe.level":
            text = {None: "null", True: "true", False: "false"}.get(earlier, earlier)
            changed.setdefault(_JOINT_KEYS.get(key.removeprefix(_ASCEND), key), []).append(f"{key}={text}")
    return [Suspect("keys", words[0].partition(".")[0], name, tuple(words)) for name, words in changed.items()]


def _dependents(row: str, rows: Mapping[str, PatchSpec]) -> frozenset[str]:
    """Return a row and all that need it, also through others."""
    found = {row}
    while more := {name for name, spec in rows.items() if found & {*spec.needs}} - found:
        found |= more
    return frozenset(found)


def words_without(run: RunSpec, part: Sequence[Suspect]) -> list[str]:
    """Return the overrides that turn a part of the run off."""
    words = [word for each in part for word in each.words]
    rows = sorted({row for each in part for row in each.rows})
    patches = [*run.recipe.patches, *(f"-{row}" for row in rows)]
    return [*words, *([f"recipe.patches=[{','.join(patches)}]"] if rows else [])]


class SearchResult(NamedTuple):
    """Hold the result of a search: the smallest part, whether the run passes without it, and the number of starts."""

    part: list[Suspect]
    confirmed: bool
    starts: int


def find_part(
    suspects: Sequence[Suspect], passes_without: Callable[[Sequence[Suspect]], bool], known: bool
) -> SearchResult:
    """Return the smallest part of the suspects without which a run passes: by kind, then by stage, then one by one.

    passes_without starts the run without a part, at most MAX_STARTS times. known: whether it passes without all of
    them, as at the level before. Of several parts that fail by themselves none is found: then nothing is confirmed.
    """
    part, starts, confirmed = list(suspects), 0, known

    def passes(tried: Sequence[Suspect]) -> bool:
        nonlocal starts
        starts += 1
        return passes_without(tried)

    if not part or (not known and not passes(part)):
        return SearchResult(part, False, starts)
    confirmed = True
    for grain in (lambda each: each.kind, lambda each: (each.kind, each.stage), lambda each: each.name):
        groups = [list(group) for _, group in itertools.groupby(part, grain)]
        while len(groups) > 1 and starts < MAX_STARTS:
            middle = 1 if groups[0][0].kind == "graphs" else len(groups) // 2
            confirmed = passes([each for group in groups[:middle] for each in group])
            groups = groups[:middle] if confirmed else groups[middle:]
        part = [each for group in groups for each in group]
    if not confirmed and starts < MAX_STARTS:
        confirmed = passes(part)
    return SearchResult(part, confirmed, starts)


def step_figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {seconds: {phase: of the last step}, logprob_delta: the largest mean} of a start's steps."""
    deltas = [step["logprob_delta"].get("mean") for step in steps if step["logprob_delta"]]
    largest = max((delta for delta in deltas if delta is not None), default=None)
    return {"seconds": steps[-1]["seconds"] if steps else {}, "logprob_delta": largest}
