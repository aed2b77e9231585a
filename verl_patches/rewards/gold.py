r"""Check before a run that the right answer of a row can score: its gold answer, in the form that its prompt asks for.

The form is \boxed{}, a line "Answer: X" or a line "#### X"; where the prompt names none, any of them. Each part that
compares answers must give it 1: maths, by_source, and verl's own maths scores by data source.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_patches.recipe import Part
from verl_patches.rewards import learnable, maths

_FORMS = {r"\boxed": r"\boxed{{{}}}", "Answer:": "Answer: {}", "####": "#### {}"}  # {marker: a right answer with it}
# A prompt asks for a marker by the word form or format before it, or by quotes around it behind one of the other words;
# a marker behind a question, or that ends the prompt, is a cue to answer.
_REQUEST = r"\bform(?:at)?\b[^\n?]{{0,60}}?{0}(?!\s*\Z)"
_REQUEST += r"|\b(?:after|line|with|begins?|starts?|ends?)\b[^\n?]{{0,60}}?[\"'`*]+{0}"
_UNUSABLE = {
    "####": "a `####` line",
    r"^\[\s*\"": "a JSON list",
    r"</\w+>": "text with tags",
    r"(?s)^(?!.*\\begin\{).*\n": "several lines",  # a matrix may have them
}
_REMEDY = (
    "make the data with `data build` (docs/data.md): handler gsm8k reads `####` lines, maths a list of one answer, and "
    "map_keys={response: COLUMN} names the column of the answer alone"
)
# data sources whose answers verl.utils.reward_score compares as maths; for others it may run the answer as code, so
# they are only tried with an empty answer
_VERLS_MATHS = re.compile(r"openai/gsm8k|(lighteval|DigitalLearningGmbH)/MATH.*|math_dapo|aime.*|numina_.*")


def gold_fault(gold: Any) -> str | None:
    """Return why no model would write a gold answer; None if one can."""
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return f"is {gold!r:.60}; expected a text or a number"
    text = str(gold).strip()
    if not 0 < len(text) <= maths.MAX_ANSWER_CHARS:
        return f"has {len(text)} characters; expected 1 to {maths.MAX_ANSWER_CHARS}"
    kinds = [kind for pattern, kind in _UNUSABLE.items() if re.search(pattern, text)]
    if any(char.isdecimal() and not unicodedata.normalize("NFKC", char).isascii() for char in text):
        kinds.append("digits other than 0 to 9")
    return f"is {text!r:.60}, {kinds[0]}; expected the answer alone" if kinds else None


class GoldCheck:
    """Check gold answers by the parts of a run's reward; `skipped` are functions of the user, which are not called."""

    def __init__(self, parts: Sequence[Part], verls_score: Callable[..., Any]):
        self.skipped = [part for part in parts if part.entry.name == "python"]
        self._parts = [part for part in parts if part.entry.name in ("maths", "by_source", "learnable", "data_source")]
        self._verls_score = verls_score

    def row_fault(self, source: str, prompt: str, gold: Any, extra_info: Mapping[str, Any] | None) -> str | None:
        """Return why a right answer to `prompt` would not score 1, and what to do; None if it would."""
        faults = (self._fault(part, source, prompt, gold, extra_info) for part in self._parts)
        return next((f"{part}: {fault}" for part, fault in zip(self._parts, faults, strict=True) if fault), None)

    def _fault(self, part: Part, source: str, prompt: str, gold: Any, extra_info: Any) -> str | None:
        name, score = part.entry.name, self._verls_score if part.entry.name == "data_source" else maths.compute_score
        if name == "learnable" or (name == "by_source" and source == learnable.DATA_SOURCE):
            known = ", ".join(learnable.KINDS)
            return None if gold in learnable.KINDS else f"the gold answer is {gold!r:.60}; expected one of {known}"
        if name == "data_source" and not _VERLS_MATHS.fullmatch(source):
            return _source_fault(self._verls_score, source)
        if fault := gold_fault(gold):
            return f"the gold answer (reward_model.ground_truth) {fault}: {_REMEDY}"
        text = maths.last_box(str(gold)) or str(gold).strip()
        asked = []
        for marker, form in _FORMS.items():
            request = re.search(_REQUEST.format(re.escape(marker)), prompt)
            if marker in prompt and (marker == r"\boxed" or request):
                asked.append(form)
        answers = [form.format(text) for form in asked or _FORMS.values()]
        try:
            for result in (score(source, answer, gold, extra_info) for answer in answers):
                right = result.get("acc", result["score"]) if isinstance(result, Mapping) else result
                if float(right) >= 1:
                    return None
        except ImportError as error:
            return f"verl's score of data_source {source!r} needs a package: {error}; install it"
        form = f"in the form that the prompt asks for, {answers[0]!r:.80}," if asked else "in each form"
        remedy = (
            "either {name: maths}, which reads the last \\boxed{} (build the data with prompt_type=boxed), "
            "or {name: data_source}, verl's own score"
        )
        return f"the gold answer {form} scores below 1, and so would right answers; use in recipe.rewards {remedy}"


@functools.cache
def _source_fault(verls_score: Callable[..., Any], source: str) -> str | None:
    try:
        verls_score(source, "", "0")
    except NotImplementedError:
        remedy = "name another reward in recipe.rewards, or build with a data_source of verl.utils.reward_score"
        return f"verl has no score for data_source {source!r}; {remedy}"
    except Exception:  # it is known, and needs more than an empty answer
        pass
    return None
