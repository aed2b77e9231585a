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
from verl_patches.step.objectives.chat import MESSAGE_FIELDS, Message, parse_calls, parse_functions
from verl_patches.values import read_yaml, unknown_key

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
EXTRA_INFO_KEYS = ("index", "split", "answer", "solution", "origin")  # keys of extra_info
RESPONSE_KEYS = ("response", "chosen", "rejected", "steps")
TEMPLATES_FILE = REPOSITORY / "data" / "templates.yaml"  # {name: {user: Jinja, system: text}}
MODEL_TEMPLATE = "model"  # prompt_type that leaves messages as they are
CONVERSATION_COLUMNS = ("messages", "tools")  # of sft data with tools, tool messages or further fields
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}  # of ShareGPT


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
        found = next((value for value in map(self._column, columns) if value is not None), None)
        if found is None and needed:
            expected = f"{field} in column {' or '.join(columns)}"
            hint = f"name its column with map_keys={{{field}: COLUMN}}"
            raise ValueError(f"expected {expected}, found the columns {self.column_names}; {hint}")
        return found

    def text(self, field: str, needed: bool = True) -> str:
        """Return a field's text; empty if it is not needed and missing."""
        value = self.get(field, needed)
        return "" if value is None else require_text(value, field, may_be_empty=not needed)

    def _column(self, name: str) -> Any:
        """Return the value of a column; A.B is B in the object of column A, unless a column has that name."""
        found: Any = self.values
        for part in [name] if name in self.values else name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def messages(self, field: str, text_role: str) -> list[Message]:
        """Return a field's messages, or its text as a message of `text_role`; in both cases the role of the last."""
        value = self.get(field)
        if isinstance(value, str):
            return [{"role": text_role, "content": require_text(value, field)}]
        _require(isinstance(value, list) and value != [], f"{field} to be text or messages", value)
        messages = [_message(one, field) for one in value]
        if (role := messages[-1]["role"]) != text_role:
            raise ValueError(f"expected the last message of {field} to have role {text_role}, found {role}")
        return messages


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
    if isinstance(value, str) and value.lstrip().startswith('["'):  # the JSON of a list, as ["42"]
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"expected one answer, found a list of {len(value)}")
        value = value[0]
    if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
        value = str(value)  # raises ValueError for an integer of more than 4300 digits
    answer = require_text(value, "the answer").strip()
    if fault := gold_fault(answer):
        raise ValueError(f"the answer {fault}")
    return answer


def _message(value: Any, field: str) -> Message:
    """Return the message of {role, content} or {from, value}, and of MESSAGE_FIELDS; ValueError for other fields."""
    _require(isinstance(value, dict), f"a message of {field} with role and content", value)
    given = {str(name): each for name, each in value.items() if each not in (None, "", [], {})}
    role = require_text(given.pop("role", given.pop("from", None)), f"a role of {field}")
    content = given.pop("content", given.pop("value", ""))
    if role not in _ROLES:
        raise ValueError(f"expected a role of {field} to be {', '.join(_ROLES)}, found {role!r:.60}")
    if unknown := sorted(given.keys() - {*MESSAGE_FIELDS}):
        expected = f"only the fields {', '.join(MESSAGE_FIELDS)} in a message of {field}"
        raise ValueError(f"expected {expected}, found {unknown[0]!r:.60}; remove it")
    if role == "function_call":
        given["tool_calls"], content = content, ""
    for key in given.keys() - {"tool_calls"}:
        require_text(given[key], key)
    content = require_text(content, f"a message of {field}", role in ("tool", "observation") or "tool_calls" in given)
    if "tool_calls" in given:  # templates take an empty content for an answer
        given["tool_calls"], content = parse_calls(given["tool_calls"]), content or None
    return {"role": _ROLES[role], "content": content, **given}


def _with_system(messages: list[Message], *given: str | None) -> list[Message]:
    """Return messages that begin with one system message, or none: theirs or a given one."""
    heads = next((n for n, one in enumerate(messages) if one["role"] != "system"), len(messages))
    found = {*filter(None, given), *(one["content"] for one in messages[:heads])}
    if len(found) > 1:
        shown = " and ".join(f"{text!r:.40}" for text in sorted(found))
        raise ValueError(f"expected one system message (of messages, system and prompt_type), found {shown}")
    return [*({"role": "system", "content": text} for text in found), *messages[heads:]]


def _prompt(record: Record, messages: list[Message], template: Template | None) -> list[Message]:
    """Return the prompt with its system message, and with query and template in its last message of the user."""
    last = next((one for one in reversed(messages) if one["role"] == "user"), None)
    if last is None:
        raise ValueError("expected a message of the user in the prompt, found none")
    text = last["content"]
    if query := record.text("query", needed=False):
        text += f"\n{query}"
    if template is not None:
        text = template.render({**record.values, "prompt": text})
        text = require_text(text, "the text that prompt_type renders").strip()
    messages = [{**one, "content": text} if one is last else one for one in messages]
    return _with_system(messages, record.text("system", needed=False), template.system if template else None)


# what each handler reads: `prompt` as it is given, and `answer`, the gold answer


def _read_maths(record: Record) -> Row:
    return {"prompt": record.messages("prompt", "user"), "answer": _answer(record.get("response"))}


def _read_gsm8k(record: Record) -> Row:
    solution = record.text("response")
    _, sign, answer = solution.rstrip().rpartition("\n")[2].rpartition("####")
    if not sign or not answer:
        raise ValueError('expected the answer to end in a line such as "#### 42", found no such line')
    answer = _answer(answer.replace(",", ""))
    return {"prompt": record.messages("prompt", "user"), "answer": answer, "solution": solution}


def _read_answers(record: Record, *fields: str) -> Row:
    """Return the prompt, and the last message of each field.

    Earlier messages of a field, which must begin with field prompt if there is one, are the prompt.
    """
    messages = {field: record.messages(field, "assistant") for field in fields}
    before = {field: found[:-1] for field, found in messages.items() if len(found) > 1}
    prompt = [] if before and record.get("prompt", needed=False) is None else record.messages("prompt", "user")
    for field, found in before.items():
        skipped = 1 if prompt and found[0]["role"] == "system" != prompt[0]["role"] else 0
        if found[skipped : skipped + len(prompt)] != prompt:
            raise ValueError(f"expected the messages of {field} to begin with prompt, found others")
        if found != next(iter(before.values())):
            raise ValueError(
                f"expected the same prompt before the last message of {' and '.join(fields)}, found different ones"
            )
    return {"prompt": next(iter(before.values()), prompt), **{field: found[-1] for field, found in messages.items()}}


def _read_instruction(record: Record) -> Row:
    if record.get("messages", needed=False) is None:
        return _read_answers(record, "response")
    *prompt, last = record.messages("messages", "assistant")
    return {"prompt": prompt, "response": last}


def _read_preference(record: Record) -> Row:
    row = _read_answers(record, "chosen", "rejected")
    if row["chosen"] == row["rejected"]:
        raise ValueError("expected chosen and rejected to differ, found them equal")
    return row


def _read_labelled(record: Record) -> Row:
    label = record.get("label")
    _require(isinstance(label, bool | int) and label in (0, 1), "label to be true or false", label)
    return {**_read_answers(record, "response"), "label": bool(label)}


def _read_process(record: Record) -> Row:
    steps, labels = record.get("steps"), record.get("labels")
    for name, value in (("steps", steps), ("labels", labels)):
        _require(isinstance(value, list) and value != [], f"{name} to be a list that is not empty", value)
    _require(len(steps) == len(labels), f"a label for each of {len(steps)} steps", len(labels))
    for label in labels:
        _require(isinstance(label, bool | int | float) and 0 <= label <= 1, "labels from 0 to 1", label)
    steps = [require_text(step, "a step") for step in steps]
    labels = [float(label) for label in labels]
    return {"prompt": record.messages("prompt", "user"), "steps": steps, "labels": labels}


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
    "tools": ("tools",),
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
    "text": Handler(lambda record: {"text": record.text("text")}, "text", ("text",), {"text": ("text", "content")}),
}


def make_row(
    handler: Handler, record: Record, template: Template | None, data_source: str, origin: str, additional: list[str]
) -> Row:
    """Return the row of a record; extra_info.index and .split are filled in when it is written."""
    row = handler.read(record)
    answer, solution = row.pop("answer", ""), row.pop("solution", None) or record.text("solution", needed=False)
    if "prompt" in row:
        row["prompt"] = _prompt(record, row["prompt"], template)
        row |= _responses(handler, row, parse_functions(record.get("tools", needed=False) or [], "tools"))
    row = verl_row(data_source, row, handler.ability, answer, origin, solution)
    for name in additional:
        if name not in record.values:
            raise ValueError(f"dataset_additional_keys: expected a column {name}, found {record.column_names}")
        value = record.values[name]
        text = value if isinstance(value, str) else json.dumps(value, default=str, allow_nan=False)
        row["extra_info"][name] = require_text(text, name, may_be_empty=True)
    return row


def verl_row(source: str, columns: Row, ability: str, answer: str, origin: str, solution: str = "") -> Row:
    """Return a row with verl's columns beside `columns`."""
    extra = dict(zip(EXTRA_INFO_KEYS, (-1, "", answer, solution, origin), strict=True))
    reward = {"style": "rule", "ground_truth": answer}
    return {"data_source": source, **columns, "ability": ability, "reward_model": reward, "extra_info": extra}


def _responses(handler: Handler, row: Row, tools: list[dict[str, Any]]) -> Row:
    """Return the responses of a row as texts, or as messages, with `tools`, where texts alone cannot hold the row."""
    responses = {name: row[name] for name in RESPONSE_KEYS if isinstance(row.get(name), dict)}
    messages = [*row["prompt"], *responses.values()]
    more = {name for one in messages for name in one} - {"role", "content"}
    more |= {"role tool" for one in messages if one["role"] == "tool"} | {"tools" for _ in tools}
    if more and "messages" not in handler.fields:
        hint = "use handler instruction, which keeps them, or remove them"
        raise ValueError(f"expected texts alone, found {', '.join(sorted(more))}; {hint}")
    if (role := row["prompt"][-1]["role"]) not in ("user", "tool"):
        raise ValueError(f"expected the last message of the prompt to have role user or tool, found {role}")
    if more:
        return {**responses, "tools": tools}
    return {name: message["content"] for name, message in responses.items()}


def conversation_row(row: Row) -> Row:
    """Return an sft row with CONVERSATION_COLUMNS in place of prompt and response."""
    response = row["response"]
    response = {"role": "assistant", "content": response} if isinstance(response, str) else response
    messages = [dict.fromkeys(MESSAGE_FIELDS) | one for one in (*row["prompt"], response)]
    for one in messages:
        one["tool_calls"] = json.dumps(one["tool_calls"]) if one["tool_calls"] else None
    columns = {"messages": messages, "tools": json.dumps(row["tools"]) if row.get("tools") else None}
    return {name: value for name, value in row.items() if name not in ("prompt", "response")} | columns


def json_digest(value: Any) -> int:
    """Return a 64-bit digest of a JSON value; among a million values two are alike once in 37 million cases."""
    return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=8).digest(), "big", signed=True)


def parquet_schema(columns: Iterable[str], additional: Iterable[str] = ()) -> pyarrow.Schema:
    """Return the schema of rows with these columns of fixed data and further keys of extra_info, which are text."""
    import pyarrow as pa

    text, columns = pa.string(), tuple(columns)
    struct = pa.struct(dict.fromkeys(MESSAGE_FIELDS, text))
    kinds = {"label": pa.bool_(), "steps": pa.list_(text), "labels": pa.list_(pa.float64())}
    kinds["messages"] = pa.list_(struct)
    messages = pa.list_(pa.struct({"role": text, "content": text}))
    extra = {"index": pa.int64(), **dict.fromkeys((*EXTRA_INFO_KEYS[1:], *additional), text)}
    fields = {"data_source": text}
    if not {"text", "messages"} & {*columns}:
        fields["prompt"] = messages
    fields |= {
        "ability": text,
        "reward_model": pa.struct({"style": text, "ground_truth": text}),
        "extra_info": pa.struct(extra),
    }
    return pa.schema(fields | {name: kinds.get(name, text) for name in columns})
