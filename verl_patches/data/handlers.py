"""Handlers of `data build`: what is read of a record, and the columns of the row that it becomes.

Each row has verl's columns (data_source, prompt, ability, reward_model, extra_info), and those that an objective on
fixed data reads (objectives/settings.py). Whatever is wrong with a record is a ValueError: one sentence, without place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_patches.data.templates import Template
from verl_patches.rewards.maths import MAX_ANSWER_CHARS

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
EXTRA = ("index", "split", "answer", "solution", "origin")  # of extra_info
RESPONSES = ("response", "chosen", "rejected", "steps")
_GSM8K_ANSWER = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's


class Record:
    """One record of an input, read by the fields of a handler; `columns`: {field: columns, the first that is there}."""

    def __init__(self, values: Any, columns: Mapping[str, tuple[str, ...]]):
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, found {type(values).__name__}")
        self.values, self.columns = values, columns

    def get(self, field: str, needed: bool = True) -> Any:
        """The value; None for one that may be missing."""
        columns = self.columns[field]
        found = next((self.values[name] for name in columns if self.values.get(name) is not None), None)
        if found is None and needed:
            there = ", ".join(sorted(map(str, self.values)))
            raise ValueError(
                f"expected {' or '.join(columns) or 'a column'} for {field}, found {there:.200}; name it in map_keys"
            )
        return found

    def text(self, field: str, needed: bool = True) -> str:
        """A text; empty where it may be missing."""
        value = self.get(field, needed)
        return "" if value is None else text_of(value, field, may_be_empty=not needed)


def text_of(value: Any, field: str, may_be_empty: bool = False) -> str:
    """The same text; ValueError for another value, an empty one, and one that UTF-8 cannot store."""
    if not isinstance(value, str):
        raise ValueError(f"expected {field} to be text, found {type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise ValueError(f"expected {field} to hold text, found it empty")
    value.encode("utf-8")  # a lone surrogate; UnicodeEncodeError is a ValueError
    return value


def _answer(value: Any) -> str:
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if is_number and not isinstance(value, bool):
        value = str(value)  # ValueError for an integer of more than 4300 digits
    answer = text_of(value, "response").strip()
    if len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(f"expected an answer of at most {MAX_ANSWER_CHARS} characters, found {len(answer)}")
    return answer


def messages_of(value: Any, field: str) -> list[dict[str, str]]:
    """Messages of a text, or of a list of {role, content} or {from, value}."""
    if isinstance(value, str):
        return [{"role": "user", "content": text_of(value, field)}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected {field} to be text or a list of messages, found {type(value).__name__}")
    messages = []
    for one in value:
        if not isinstance(one, dict):
            raise ValueError(f"expected messages of {field} to have role and content, found {type(one).__name__}")
        role = text_of(one.get("role") or one.get("from"), f"a role of {field}")
        content = text_of(one.get("content") or one.get("value"), f"a message of {field}")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _last(value: Any, field: str) -> str:
    """A response: a text, or the last of messages."""
    return text_of(value, field) if isinstance(value, str) else messages_of(value, field)[-1]["content"]


def _prompt(record: Record, value: Any, template: Template | None) -> list[dict[str, str]]:
    messages = messages_of(value, "prompt")
    if messages[-1]["role"] != "user":
        raise ValueError(f"expected the prompt to end with a message of user, found {messages[-1]['role']}")
    if query := record.text("query", needed=False):
        messages[-1]["content"] += f"\n{query}"
    system = record.text("system", needed=False)
    if template is not None:
        text = template.render({**record.values, "prompt": messages[-1]["content"]})
        messages[-1]["content"], system = text_of(text, "what prompt_type makes").strip(), system or template.system
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _maths(record: Record) -> Row:
    return {"prompt": record.get("prompt"), "answer": _answer(record.get("response"))}


def _gsm8k(record: Record) -> Row:
    solution = record.text("response")
    if not (match := _GSM8K_ANSWER.search(solution)):
        raise ValueError('expected the answer to end in a line "#### 42"')
    return {"prompt": record.get("prompt"), "answer": _answer(match[1].replace(",", "")), "solution": solution}


def _instruction(record: Record) -> Row:
    if (talk := record.get("messages", needed=False)) is None:
        return {"prompt": record.get("prompt"), "response": _last(record.get("response"), "response")}
    messages = messages_of(talk, "messages")
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise ValueError(f"expected messages to end with one of assistant, found {messages[-1]['role']}")
    return {"prompt": messages[:-1], "response": messages[-1]["content"]}


def _preference(record: Record) -> Row:
    chosen, rejected = record.get("chosen"), record.get("rejected")
    prompt = record.get("prompt", needed=isinstance(chosen, str))
    row = {"chosen": _last(chosen, "chosen"), "rejected": _last(rejected, "rejected")}
    if row["chosen"] == row["rejected"]:
        raise ValueError("expected chosen and rejected to differ, found them equal")
    return {"prompt": chosen[:-1] if prompt is None else prompt, **row}


def _labelled(record: Record) -> Row:
    label = record.get("label")
    if label not in (0, 1):
        raise ValueError(f"expected label to be true or false, found {label!r:.40}")
    return {"prompt": record.get("prompt"), "response": _last(record.get("response"), "response"), "label": bool(label)}


def _process(record: Record) -> Row:
    steps, labels = record.get("steps"), record.get("labels")
    if not isinstance(steps, list) or not isinstance(labels, list) or not steps or len(steps) != len(labels):
        raise ValueError("expected steps and labels to be lists of the same length, not empty")
    if wrong := [one for one in labels if not isinstance(one, bool | int | float) or not 0 <= one <= 1]:
        raise ValueError(f"expected labels to be true, false or numbers from 0 to 1, found {wrong[0]!r:.40}")
    steps = [text_of(step, "a step") for step in steps]
    return {"prompt": record.get("prompt"), "steps": steps, "labels": [float(one) for one in labels]}


def _text(record: Record) -> Row:
    return {"text": record.text("text")}


@dataclass(frozen=True)
class Handler:
    """`fields`: {field: columns that it is read from}; `columns`: of fixed data; `used_by`: presets of configs/algo."""

    read: Callable[[Record], Row]
    fields: Mapping[str, tuple[str, ...]]
    columns: tuple[str, ...]
    ability: str
    used_by: str


_PROMPT = {
    "prompt": ("prompt", "instruction", "problem", "question"),
    "query": ("query", "input"),
    "system": ("system",),
}
_MATHS = {**_PROMPT, "prompt": ("problem", "question", "prompt"), "response": ("answer",), "solution": ("solution",)}
_RESPONSE = ("response", "output", "completion")
HANDLERS = {
    "maths": Handler(_maths, _MATHS, (), "math", "grpo and its kin, ppo"),
    "gsm8k": Handler(_gsm8k, {**_MATHS, "prompt": ("question", "prompt"), "solution": ()}, (), "math", "the same"),
    "instruction": Handler(
        _instruction,
        {**_PROMPT, "response": _RESPONSE, "messages": ("messages", "conversations")},
        ("response",),
        "instruction",
        "sft",
    ),
    "preference": Handler(
        _preference,
        {**_PROMPT, "chosen": ("chosen",), "rejected": ("rejected",)},
        ("chosen", "rejected"),
        "preference",
        "dpo, ipo, rm",
    ),
    "labelled": Handler(
        _labelled, {**_PROMPT, "response": _RESPONSE, "label": ("label",)}, ("response", "label"), "preference", "kto"
    ),
    "process": Handler(
        _process,
        {**_PROMPT, "steps": ("steps", "completions"), "labels": ("labels",)},
        ("steps", "labels"),
        "process",
        "prm",
    ),
    "text": Handler(_text, {"text": ("text", "content")}, ("text",), "text", "sft"),
}
MINDSPEED = {  # its names of handlers
    "R1AlpacaStyleInstructionHandler": "maths",
    "PPOAlpacaStyleInstructionHandler": "maths",
    "AlpacaStyleInstructionHandler": "instruction",
    "SharegptStyleInstructionHandler": "instruction",
    "AlpacaStylePairwiseHandler": "preference",
    "SharegptStylePairwiseHandler": "preference",
    "AlpacaStyleProcessRewardHandler": "process",
    "GeneralPretrainHandler": "text",
}


def make_row(
    handler: Handler, record: Record, template: Template | None, data_source: str, origin: str, additional: list[str]
) -> Row:
    """The row of a record; extra_info.index and .split are filled in when it is written."""
    row = handler.read(record)
    if "prompt" in row:
        row["prompt"] = _prompt(record, row["prompt"], template)
    solution = row.pop("solution", None)
    if solution is None:
        solution = record.text("solution", needed=False) if handler.fields.get("solution") else ""
    answer = row.pop("answer", "")
    extra = {"index": -1, "split": "", "answer": answer, "solution": solution, "origin": origin}
    for name in additional:
        if name not in record.values:
            raise ValueError(f"expected the column {name} (dataset_additional_keys), found none of that name")
        value = record.values[name]
        text = value if isinstance(value, str) else json.dumps(value, default=str, allow_nan=False)
        extra[name] = text_of(text, name, may_be_empty=True)
    return verl_row(row, data_source, handler.ability, answer, extra)


def verl_row(columns: Row, data_source: str, ability: str, ground_truth: str, extra_info: Row) -> Row:
    """A row of verl's schema with further columns, `prompt` among them."""
    reward = {"style": "rule", "ground_truth": ground_truth}
    return {"data_source": data_source, **columns, "ability": ability, "reward_model": reward, "extra_info": extra_info}


def schema_of(columns: tuple[str, ...], additional: tuple[str, ...] = ()) -> pyarrow.Schema:
    """The schema of rows with these columns of fixed data and further keys of extra_info, which are text."""
    import pyarrow as pa

    text = pa.string()
    kinds = {"label": pa.bool_(), "steps": pa.list_(text), "labels": pa.list_(pa.float64())}
    extra = [("index", pa.int64()), *((name, text) for name in (*EXTRA[1:], *additional))]
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    return pa.schema(
        [
            ("data_source", text),
            *([] if columns == ("text",) else [("prompt", messages)]),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra)),
            *((name, kinds.get(name, text)) for name in columns),
        ]
    )
