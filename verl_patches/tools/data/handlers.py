"""Handle the records of `data build`: read their fields, make prompts by prompt_type, and return rows.

Each row has verl's columns (data_source, prompt, ability, reward_model, extra_info), and those that an objective on
fixed data reads (step/objectives/settings.py). Any fault of a record is a ValueError of one sentence, which does not
name the record's place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.rewards.gold import gold_fault
from verl_patches.run.environment import REPOSITORY
from verl_patches.values import read_yaml, unknown_key

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
EXTRA_INFO_KEYS = ("index", "split", "answer", "solution", "origin")  # keys of extra_info
RESPONSE_KEYS = ("response", "chosen", "rejected", "steps")
TEMPLATES_FILE = REPOSITORY / "data" / "templates.yaml"  # {name: {user: Jinja, system: text}}
MODEL_TEMPLATE = "model"  # prompt_type that leaves messages as they are
_ROLES = {"human": "user", "gpt": "assistant"}  # roles of ShareGPT


class Record:
    """Hold one record of an input; `columns`: {field: its columns, of which the first with a value counts}."""

    def __init__(self, values: Any, columns: Mapping[str, tuple[str, ...]]):
        _require(isinstance(values, dict), "an object", values)
        self.values, self.columns = values, columns

    @property
    def column_names(self) -> str:
        """Return the names of its columns."""
        return f"{', '.join(sorted(map(str, self.values))):.200}"

    def get(self, field: str, needed: bool = True) -> Any:
        """Return the value of a field; None if it is not needed and missing."""
        columns = self.columns.get(field, ())
        found = next((value for name in columns if (value := _column(self.values, name)) is not None), None)
        if found is None and needed:
            expected = f"{field} in column {' or '.join(columns)}"
            hint = f"name its column with map_keys={{{field}: COLUMN}}"
            raise ValueError(f"expected {expected}, found the columns {self.column_names}; {hint}")
        return found

    def text(self, field: str, needed: bool = True) -> str:
        """Return a field's text; empty if it is not needed and missing."""
        value = self.get(field, needed)
        return "" if value is None else require_text(value, field, may_be_empty=not needed)

    def response(self, field: str) -> str:
        """Return a field's text, or the last one of its messages, which must be the assistant's."""
        value = self.get(field)
        return require_text(value, field) if isinstance(value, str) else _conversation(value, field)[-1]["content"]


def _column(values: Any, name: str) -> Any:
    """Return the value of a column, or of a nested one such as reward_model.ground_truth; None without it."""
    if not isinstance(values, dict) or name in values or "." not in name:
        return values.get(name) if isinstance(values, dict) else None
    outer, _, inner = name.partition(".")
    return _column(values.get(outer), inner)


class Template:
    """Hold the Jinja text of a user message, and the system message or None; ConfigError for invalid Jinja."""

    def __init__(self, user: str, system: str | None = None):
        from jinja2 import StrictUndefined, TemplateError  # imported here, as other commands need no jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.system = system
        try:
            self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(user)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"prompt_type: expected a Jinja template, found {user!r:.80}: {error}") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text; raise ValueError where it cannot be made, for example of a missing value."""
        try:
            return self._template.render(values)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"prompt_type: the template cannot be rendered: {error}") from None


def read_template(prompt_type: str) -> Template | None:
    """Return the template that a prompt_type names or contains, None for the model's own; ConfigError if neither."""
    if prompt_type == MODEL_TEMPLATE:
        return None
    if "{{" in prompt_type or "{%" in prompt_type:
        return Template(prompt_type)
    found = read_yaml(TEMPLATES_FILE)
    if prompt_type in found:
        return Template(**found[prompt_type])
    hint = f"expected {MODEL_TEMPLATE}, {', '.join(found)} or a Jinja template"
    fault = unknown_key(prompt_type, {MODEL_TEMPLATE: 0, **found}, hint)
    raise ConfigError(f"prompt_type is {prompt_type:.80}; {fault.partition('; ')[2]}")


def _require(fits: bool, expected: str, found: Any) -> None:
    if not fits:
        shown = f"{found!r:.60}" if isinstance(found, bool | int | float) else type(found).__name__
        raise ValueError(f"expected {expected}, found {shown}")


def require_text(value: Any, field: str, may_be_empty: bool = False) -> str:
    """Return the same text; raise ValueError if it is not text, is empty, or cannot be stored as UTF-8."""
    _require(isinstance(value, str), f"{field} to be text", value)
    if not value.strip() and not may_be_empty:
        raise ValueError(f"expected {field} to be text, found empty text")
    value.encode()  # refuses a lone surrogate, as UnicodeEncodeError is a ValueError
    return value


def _answer(value: Any) -> str:
    """Return a gold answer as text: of a number, a text, or a list of one of them, also where it is JSON text."""
    listed = value
    if isinstance(value, str) and value.lstrip().startswith('["'):
        with suppress(ValueError):
            listed = json.loads(value)
    if isinstance(listed, list) and len(listed) == 1:
        value = listed[0]
    if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
        value = str(value)  # raises ValueError for an integer of more than 4300 digits
    answer = require_text(value, "the answer").strip()
    if fault := gold_fault(answer):
        raise ValueError(f"the answer {fault}")
    return answer


def _messages(value: Any, field: str) -> list[dict[str, str]]:
    """Return messages of a text, or of a list of {role, content} or {from, value}."""
    if isinstance(value, str):
        return [{"role": "user", "content": require_text(value, field)}]
    _require(isinstance(value, list) and value != [], f"{field} to be text or messages", value)
    messages = []
    for one in value:
        _require(isinstance(one, dict), f"a message of {field} with role and content", one)
        role = require_text(one.get("role") or one.get("from"), f"a role of {field}")
        content = require_text(one.get("content") or one.get("value"), f"a message of {field}")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _conversation(value: Any, field: str, last: str = "assistant") -> list[dict[str, str]]:
    """Return messages whose last one has the role `last`."""
    messages = _messages(value, field)
    if (role := messages[-1]["role"]) != last:
        raise ValueError(f"expected the last message of {field} to have role {last}, found {role}")
    return messages


def _prompt(record: Record, value: Any, template: Template | None) -> list[dict[str, str]]:
    messages, system = _conversation(value, "prompt", "user"), record.text("system", needed=False)
    if query := record.text("query", needed=False):
        messages[-1]["content"] += f"\n{query}"
    if template is not None:
        text = template.render({**record.values, "prompt": messages[-1]["content"]})
        messages[-1]["content"] = require_text(text, "the text that prompt_type renders").strip()
        system = system or template.system or ""
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


# what each handler reads: `prompt` as it is given, and `answer`, the gold answer


def _read_maths(record: Record) -> Row:
    return {"prompt": record.get("prompt"), "answer": _answer(record.get("response"))}


def _read_gsm8k(record: Record) -> Row:
    solution = record.text("response")
    _, sign, answer = solution.rstrip().rpartition("\n")[2].rpartition("####")
    if not sign or not answer:
        raise ValueError('expected the answer to end in a line such as "#### 42", found no such line')
    return {"prompt": record.get("prompt"), "answer": _answer(answer.replace(",", "")), "solution": solution}


def _read_instruction(record: Record) -> Row:
    if (messages := record.get("messages", needed=False)) is None:
        return {"prompt": record.get("prompt"), "response": record.response("response")}
    *prompt, last = _conversation(messages, "messages")
    return {"prompt": prompt, "response": last["content"]}


def _read_preference(record: Record) -> Row:
    row = {name: record.response(name) for name in ("chosen", "rejected")}
    if row["chosen"] == row["rejected"]:
        raise ValueError("expected chosen and rejected to differ, found them equal")
    chosen = record.get("chosen")
    prompt = record.get("prompt", needed=isinstance(chosen, str))
    return {"prompt": chosen[:-1] if prompt is None else prompt, **row}


def _read_labelled(record: Record) -> Row:
    label = record.get("label")
    _require(isinstance(label, bool | int) and label in (0, 1), "label to be true or false", label)
    return {"prompt": record.get("prompt"), "response": record.response("response"), "label": bool(label)}


def _read_process(record: Record) -> Row:
    steps, labels = record.get("steps"), record.get("labels")
    for name, value in (("steps", steps), ("labels", labels)):
        _require(isinstance(value, list) and value != [], f"{name} to be a list that is not empty", value)
    _require(len(steps) == len(labels), f"a label for each of {len(steps)} steps", len(labels))
    for label in labels:
        _require(isinstance(label, bool | int | float) and 0 <= label <= 1, "labels from 0 to 1", label)
    steps = [require_text(step, "a step") for step in steps]
    return {"prompt": record.get("prompt"), "steps": steps, "labels": [float(label) for label in labels]}


def _read_text(record: Record) -> Row:
    return {"text": record.text("text")}


@dataclass(frozen=True)
class Handler:
    """Describe a handler; `fields`: {field: columns, of which the first counts}; `columns`: those of fixed data."""

    read: Callable[[Record], Row]
    ability: str
    columns: tuple[str, ...]
    fields: Mapping[str, tuple[str, ...]]


_PROMPT_FIELDS = {
    "prompt": ("prompt", "instruction", "problem", "question"),
    "query": ("query", "input"),
    "system": ("system",),
}
_MATHS_FIELDS = {**_PROMPT_FIELDS, "prompt": ("problem", "question", "prompt"), "response": ("answer",)}
_RESPONSE_FIELDS = {**_PROMPT_FIELDS, "response": ("response", "output", "completion")}
_MESSAGES_FIELDS = {"messages": ("messages", "conversations")}
_STEPS_FIELDS = {"steps": ("steps", "completions"), "labels": ("labels",)}
_PAIR_FIELDS = {"chosen": ("chosen",), "rejected": ("rejected",)}
HANDLERS = {
    "maths": Handler(_read_maths, "math", (), {**_MATHS_FIELDS, "solution": ("solution",)}),
    "gsm8k": Handler(_read_gsm8k, "math", (), _MATHS_FIELDS),
    "instruction": Handler(_read_instruction, "instruction", ("response",), {**_RESPONSE_FIELDS, **_MESSAGES_FIELDS}),
    "preference": Handler(_read_preference, "preference", ("chosen", "rejected"), {**_PROMPT_FIELDS, **_PAIR_FIELDS}),
    "labelled": Handler(_read_labelled, "preference", ("response", "label"), {**_RESPONSE_FIELDS, "label": ("label",)}),
    "process": Handler(_read_process, "process", ("steps", "labels"), {**_PROMPT_FIELDS, **_STEPS_FIELDS}),
    "text": Handler(_read_text, "text", ("text",), {"text": ("text", "content")}),
}


def make_row(
    handler: Handler, record: Record, template: Template | None, data_source: str, origin: str, additional: list[str]
) -> Row:
    """Return the row of a record; extra_info.index and .split are filled in when it is written."""
    row = handler.read(record)
    answer, solution = row.pop("answer", ""), row.pop("solution", None) or record.text("solution", needed=False)
    if "prompt" in row:
        row["prompt"] = _prompt(record, row["prompt"], template)
    extra = dict(zip(EXTRA_INFO_KEYS, (-1, "", answer, solution, origin), strict=True))
    for name in additional:
        if name not in record.values:
            raise ValueError(f"dataset_additional_keys: expected a column {name}, found {record.column_names}")
        value = record.values[name]
        text = value if isinstance(value, str) else json.dumps(value, default=str, allow_nan=False)
        extra[name] = require_text(text, name, may_be_empty=True)
    reward = {"style": "rule", "ground_truth": answer}
    return {"data_source": data_source, **row, "ability": handler.ability, "reward_model": reward, "extra_info": extra}


def json_digest(value: Any) -> int:
    """Return a 64-bit digest of a JSON value; among a million values two are alike once in 37 million cases."""
    return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=8).digest(), "big", signed=True)


def parquet_schema(columns: Iterable[str], additional: Iterable[str] = ()) -> pyarrow.Schema:
    """Return the schema of rows with these columns of fixed data and further keys of extra_info, which are text."""
    import pyarrow as pa

    text, columns = pa.string(), tuple(columns)
    kinds = {"label": pa.bool_(), "steps": pa.list_(text), "labels": pa.list_(pa.float64())}
    messages = pa.list_(pa.struct({"role": text, "content": text}))
    extra = {"index": pa.int64(), **dict.fromkeys((*EXTRA_INFO_KEYS[1:], *additional), text)}
    fields = {"data_source": text}
    if "text" not in columns:
        fields["prompt"] = messages
    fields |= {
        "ability": text,
        "reward_model": pa.struct({"style": text, "ground_truth": text}),
        "extra_info": pa.struct(extra),
    }
    return pa.schema(fields | {name: kinds.get(name, text) for name in columns})
