r"""Check before a run that the right answer of a row can score: its gold answer, in the form that its prompt asks for.

The form is \boxed{}, a line "Answer: X" or a line "#### X"; where the prompt names none, any of them. Each part that
compares answers must give it 1: maths, by_source, and verl's own maths scores by data source. A function of the user
(part python) is not called.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_patches.recipe import REWARD_KEYS, Part
from verl_patches.rewards import learnable, maths

Score = Callable[..., Any]
_FORMS = {r"\boxed{}": r"\boxed{{{}}}", "Answer:": "Answer: {}", "####": "#### {}"}  # what a prompt names: the answer
_ASKS = r"(?:form|format|line|after|begins?|starts?|ends?)\b[^\n]{0,60}?" + "[\"'`*]*"
_ASKED = {r"\boxed{}": r"\\boxed", "Answer:": rf"{_ASKS}Answer:", "####": rf"{_ASKS}####"}
_UNUSABLE = (  # what no model writes as its answer, and its name
    (r"####", "a line `#### ANSWER`"),
    (r"^\[\s*\"", "a JSON list"),
    (r"</\w+>", "text with tags"),
    (r"\n", "several lines"),
)
_REMEDY = (
    "make the data with `data build` (docs/data.md): handler gsm8k reads `####` lines, maths a list of one answer, and "
    "map_keys={response: COLUMN} names the column of the answer alone"
)
# names of verl.utils.reward_score that compare maths answers; others may run code, and are not called here
_VERLS_MATHS = re.compile(r"openai/gsm8k|(lighteval|DigitalLearningGmbH)/MATH.*|math_dapo|aime.*|numina_.*")


def gold_fault(gold: Any) -> str | None:
    """Return why a gold answer is none that a model can write; None if it can be one."""
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return f"is {gold!r:.60}; expected a text or a number"
    text = str(gold).strip()
    if not 0 < len(text) <= maths.MAX_ANSWER_CHARS:
        return f"has {len(text)} characters; expected 1 to {maths.MAX_ANSWER_CHARS}"
    for pattern, kind in _UNUSABLE:
        if re.search(pattern, text):
            return f"is {text!r:.60}, {kind}; expected the answer alone"
    digits = [char for char in text if char.isdecimal() and not unicodedata.normalize("NFKC", char).isascii()]
    if digits:
        return f"is {text!r:.60}, with digits such as {digits[0]}; expected 0 to 9, which models write"
    return None


class GoldCheck:
    """Check the gold answers of rows by the parts of a run's reward; `skipped` are the parts that are not called."""

    def __init__(self, parts: Sequence[Part], verls_score: Callable[[], Score]):
        self.skipped = [part for part in parts if part.entry.name == "python"]
        self._parts = [part for part in parts if part.entry.name in ("maths", "by_source", "learnable", "data_source")]
        self._verls_score, self._known = verls_score, dict[str, str | None]()

    def row_fault(self, source: str, prompt: str, gold: Any, extra_info: Mapping[str, Any] | None) -> str | None:
        """Return why a right answer to `prompt` would not score 1, and what to do; None if it would."""
        for part in self._parts:
            if fault := self._part_fault(part, source, prompt, gold, extra_info):
                return fault
        return None

    def _part_fault(self, part: Part, source: str, prompt: str, gold: Any, extra_info: Any) -> str | None:
        name = part.entry.name
        if name == "learnable" or (name == "by_source" and source == learnable.DATA_SOURCE):
            known = ", ".join(learnable.KINDS)
            return None if gold in learnable.KINDS else f"{part}: the gold answer is {gold!r:.60}; expected {known}"
        score: Score = maths.compute_score
        options = {key: getattr(part.entry, key) for key in REWARD_KEYS[name]}
        if name == "data_source":
            score = self._verls_score()
            if fault := self._source_fault(part, source, score):
                return fault
            if not _VERLS_MATHS.fullmatch(source):
                return None
        if fault := gold_fault(gold):
            return f"{part}: the gold answer (reward_model.ground_truth) {fault}: {_REMEDY}"
        text = str(gold).strip()
        text = maths.last_box(text) or text
        asked = [form for form, pattern in _ASKED.items() if re.search(pattern, prompt)]
        answers = [_FORMS[form].format(text) for form in asked or _FORMS]
        named = {"data_source": source, "ground_truth": gold, "extra_info": extra_info, **options}
        try:
            if any(_is_right(score(solution_str=answer, **named)) for answer in answers):
                return None
        except Exception as error:  # verl's functions import packages when they are called
            return f"{part}: scoring the gold answer failed: {type(error).__name__}: {error}"
        form = f"in the form that the prompt asks for, {answers[0]!r:.80}," if asked else "in each form"
        remedy = (
            "{name: maths} reads the last \\boxed{}: build with prompt_type=boxed; {name: data_source} is verl's own"
        )
        return f"{part}: the gold answer {form} scores below 1, and so would right answers; in recipe.rewards {remedy}"

    def _source_fault(self, part: Part, source: str, score: Score) -> str | None:
        if source not in self._known:
            self._known[source] = None
            try:
                score(data_source=source, solution_str="", ground_truth="0", extra_info=None)
            except (NotImplementedError, ImportError) as error:
                self._known[source] = (
                    f"{part}: verl's score of data_source {source!r} cannot be called: {error}; name another reward in "
                    "recipe.rewards, or build the data with the data_source of one of verl.utils.reward_score"
                )
            except Exception:  # it is known, and needs more than an empty answer
                pass
        return self._known[source]


def _is_right(result: Any) -> bool:
    if isinstance(result, Mapping):
        result = result.get("acc", result["score"])
    return float(result) >= 1
