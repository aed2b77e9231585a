"""Handlers of `data build`: what is read of a record, its prompt by prompt_type, and the row that it becomes.

Each row has verl's columns (data_source, prompt, ability, reward_model, extra_info), and those that an objective on
fixed data reads (step/objectives/settings.py). Whatever is wrong with a record is a ValueError: one sentence, without
place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.rewards.maths import MAX_ANSWER_CHARS
from verl_patches.run.environment import REPOSITORY
from verl_patches.values import read_yaml, unknown_key

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
EXTRA = ("index", "split", "answer", "solution", "origin")  # of extra_info
RESPONSES = ("response", "chosen", "rejected", "steps")
TEMPLATES = REPOSITORY / "data" / "templates.yaml"  # {name: {user: Jinja, system: text}}
MODEL = "model"  # prompt_type: messages as they are
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's


class Record:
    """One record of an input, read by the fields of a handler; `columns`: {field: columns, the first that is there}."""

    def __init__(self, values: Any, columns: Mapping[str, tuple[str, ...]]):
        _require(isinstance(values, dict), "an object", values)
        self.values, self.columns = values, columns

    @property
    def there(self) -> str:
        """The names of its columns."""
        return f"{', '.join(sorted(map(str, self.values))):.200}"

    def get(self, field: str, needed: bool = True) -> Any:
        """The value; None for one that may be missing."""
        columns = self.columns.get(field, ())
        found = next((self.values[name] for name in columns if self.values.get(name) is not None), None)
        if found is None and needed:
            another = f"map_keys={{{field}: COLUMN}} names another"
            raise ValueError(f"expected {field} in {' or '.join(columns)}, found {self.there}; {another}")
        return found

    def text(self, field: str, needed: bool = True) -> str:
        """A text; empty where it may be missing."""
        value = self.get(field, needed)
        return "" if value is None else text_of(value, field, may_be_empty=not needed)

    def response(self, field: str) -> str:
        """A text, or the last of messages, which is of the assistant."""
        value = self.get(field)
        return text_of(value, field) if isinstance(value, str) else _talk(value, field)[-1]["content"]


class Template:
    """The Jinja text of a user message, and the system message or None. ConfigError for a text that is no Jinja."""

    def __init__(self, user: str, system: str | None = None):
        from jinja2 import StrictUndefined, TemplateError  # here, as other commands need no jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.system = system
        try:
            self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(user)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"prompt_type: expected Jinja, found {user!r:.80}: {error}") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text; ValueError where it cannot be made, such as of a value that is missing."""
        try:
            return self._template.render(values)
        except Exception as error:  # any that a template raises
            raise ValueError(f"prompt_type: {error}") from None


def template_of(prompt_type: str) -> Template | None:
    """Return the template that a prompt_type names or is, None for the model's own. ConfigError for neither."""
    if prompt_type == MODEL:
        return None
    if "{{" in prompt_type or "{%" in prompt_type:
        return Template(prompt_type)
    found = read_yaml(TEMPLATES)
    if prompt_type in found:
        return Template(**found[prompt_type])
    fault = unknown_key(prompt_type, {MODEL: 0, **found}, f"expected {MODEL}, {', '.join(found)} or a Jinja text")
    raise ConfigError(f"prompt_type is {prompt_type:.80}; {fault.partition('; ')[2]}")


def _require(fits: bool, expected: str, found: Any) -> None:
    if not fits:
        shown = f"{found!r:.60}" if isinstance(found, bool | int | float) else type(found).__name__
        raise ValueError(f"expected {expected}, found {shown}")


def text_of(value: Any, field: str, may_be_empty: bool = False) -> str:
    """The same text; ValueError for another value, an empty one, and one that UTF-8 cannot store."""
    _require(isinstance(value, str), f"{field} to be text", value)
    if not value.strip() and not may_be_empty:
        raise ValueError(f"expected {field} to hold text, found it empty")
    value.encode()  # a lone surrogate; UnicodeEncodeError is a ValueError
    return value


def _answer(value: Any) -> str:
    if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
        value = str(value)  # ValueError for an integer of more than 4300 digits
    answer = text_of(value, "the answer").strip()
    if len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(f"expected an answer of at most {MAX_ANSWER_CHARS} characters, found {len(answer)}")
    return answer


def _messages(value: Any, field: str) -> list[dict[str, str]]:
    """Messages of a text, or of a list of {role, content} or {from, value}."""
    if isinstance(value, str):
        return [{"role": "user", "content": text_of(value, field)}]
    _require(isinstance(value, list) and value != [], f"{field} to be text or messages", value)
    messages = []
    for one in value:
        _require(isinstance(one, dict), f"a message of {field} with role and content", one)
        role = text_of(one.get("role") or one.get("from"), f"a role of {field}")
        content = text_of(one.get("content") or one.get("value"), f"a message of {field}")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _talk(value: Any, field: str, last: str = "assistant") -> list[dict[str, str]]:
    """Messages whose last one has this role."""
    messages = _messages(value, field)
    if (role := messages[-1]["role"]) != last:
        raise ValueError(f"expected {field} to end with a message of {last}, found {role}")
    return messages


def _prompt(record: Record, value: Any, template: Template | None) -> list[dict[str, str]]:
    messages, system = _talk(value, "prompt", "user"), record.text("system", needed=False)
    if query := record.text("query", needed=False):
        messages[-1]["content"] += f"\n{query}"
    if template is not None:
        text = template.render({**record.values, "prompt": messages[-1]["content"]})
        messages[-1]["content"] = text_of(text, "what prompt_type makes").strip()
        system = system or template.system or ""
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


# of each handler: what it reads, `prompt` as it is given, and `answer`, the gold answer


def _maths(record: Record) -> Row:
    return {"prompt": record.get("prompt"), "answer": _answer(record.get("response"))}


def _gsm8k(record: Record) -> Row:
    solution = record.text("response")
    _, sign, answer = solution.rstrip().rpartition("\n")[2].rpartition("####")
    if not sign or not answer:
        raise ValueError('expected the answer to end in a line "#### 42"')
    return {"prompt": record.get("prompt"), "answer": _answer(answer.replace(",", "")), "solution": solution}


def _instruction(record: Record) -> Row:
    if (talk := record.get("messages", needed=False)) is None:
        return {"prompt": record.get("prompt"), "response": record.response("response")}
    *prompt, last = _talk(talk, "messages")
    return {"prompt": prompt, "response": last["content"]}


def _preference(record: Record) -> Row:
    row = {name: record.response(name) for name in ("chosen", "rejected")}
    if row["chosen"] == row["rejected"]:
        raise ValueError("expected chosen and rejected to differ, found them equal")
    chosen = record.get("chosen")
    prompt = record.get("prompt", needed=isinstance(chosen, str))
    return {"prompt": chosen[:-1] if prompt is None else prompt, **row}


def _labelled(record: Record) -> Row:
    label = record.get("label")
    _require(isinstance(label, bool | int) and label in (0, 1), "label to be true or false", label)
    return {"prompt": record.get("prompt"), "response": record.response("response"), "label": bool(label)}


def _process(record: Record) -> Row:
    steps, labels = record.get("steps"), record.get("labels")
    for name, value in (("steps", steps), ("labels", labels)):
        _require(isinstance(value, list) and value != [], f"{name} to be a list, not empty", value)
    _require(len(steps) == len(labels), f"a label for each of {len(steps)} steps", len(labels))
    for label in labels:
        _require(isinstance(label, bool | int | float) and 0 <= label <= 1, "labels from 0 to 1", label)
    steps = [text_of(step, "a step") for step in steps]
    return {"prompt": record.get("prompt"), "steps": steps, "labels": [float(label) for label in labels]}


def _text(record: Record) -> Row:
    return {"text": record.text("text")}


@dataclass(frozen=True)
class Handler:
    """`fields`: {field: columns that it is read from, the first that is there}; `columns`: those of fixed data."""

    read: Callable[[Record], Row]
    ability: str
    columns: tuple[str, ...]
    fields: Mapping[str, tuple[str, ...]]


_PROMPT = {
    "prompt": ("prompt", "instruction", "problem", "question"),
    "query": ("query", "input"),
    "system": ("system",),
}
_MATHS = {**_PROMPT, "prompt": ("problem", "question", "prompt"), "response": ("answer",)}
_ANSWERED = {**_PROMPT, "response": ("response", "output", "completion")}
_TALK, _STEPS = {"messages": ("messages", "conversations")}, {"steps": ("steps", "completions"), "labels": ("labels",)}
_PAIR = {"chosen": ("chosen",), "rejected": ("rejected",)}
HANDLERS = {
    "maths": Handler(_maths, "math", (), {**_MATHS, "solution": ("solution",)}),
    "gsm8k": Handler(_gsm8k, "math", (), _MATHS),
    "instruction": Handler(_instruction, "instruction", ("response",), {**_ANSWERED, **_TALK}),
    "preference": Handler(_preference, "preference", ("chosen", "rejected"), {**_PROMPT, **_PAIR}),
    "labelled": Handler(_labelled, "preference", ("response", "label"), {**_ANSWERED, "label": ("label",)}),
    "process": Handler(_process, "process", ("steps", "labels"), {**_PROMPT, **_STEPS}),
    "text": Handler(_text, "text", ("text",), {"text": ("text", "content")}),
}


def make_row(
    handler: Handler, record: Record, template: Template | None, data_source: str, origin: str, additional: list[str]
) -> Row:
    """The row of a record; extra_info.index and .split are filled in when it is written."""
    row = handler.read(record)
    answer, solution = row.pop("answer", ""), row.pop("solution", None) or record.text("solution", needed=False)
    if "prompt" in row:
        row["prompt"] = _prompt(record, row["prompt"], template)
    extra = dict(zip(EXTRA, (-1, "", answer, solution, origin), strict=True))
    for name in additional:
        if name not in record.values:
            raise ValueError(f"expected the column {name} (dataset_additional_keys), found {record.there}")
        value = record.values[name]
        text = value if isinstance(value, str) else json.dumps(value, default=str, allow_nan=False)
        extra[name] = text_of(text, name, may_be_empty=True)
    reward = {"style": "rule", "ground_truth": answer}
    return {"data_source": data_source, **row, "ability": handler.ability, "reward_model": reward, "extra_info": extra}


def digest_of(value: Any) -> int:
    """64 bits of a value of JSON; among a million values two have the same once in 37 million."""
    return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=8).digest(), "big", signed=True)


def schema_of(columns: Iterable[str], additional: Iterable[str] = ()) -> pyarrow.Schema:
    """The schema of rows with these columns of fixed data and further keys of extra_info, which are text."""
    import pyarrow as pa

    text, columns = pa.string(), tuple(columns)
    kinds = {"label": pa.bool_(), "steps": pa.list_(text), "labels": pa.list_(pa.float64())}
    messages = pa.list_(pa.struct({"role": text, "content": text}))
    extra = {"index": pa.int64(), **dict.fromkeys((*EXTRA[1:], *additional), text)}
    fields = {"data_source": text, **({} if "text" in columns else {"prompt": messages}), "ability": text}
    fields |= {"reward_model": pa.struct({"style": text, "ground_truth": text}), "extra_info": pa.struct(extra)}
    return pa.schema(fields | {name: kinds.get(name, text) for name in columns})
