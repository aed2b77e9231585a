"""Split conversations into prompt and response by the tokenizer's own chat template. No torch here.

The text of a row is the template's text of the whole conversation. It begins with the template's text of the prompt
with the generation prompt; the response is what follows, to its end token. A row is refused where that does not hold,
or where the template leaves out what stands in the row. All errors are a ValueError of one sentence.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, chain
from os.path import commonprefix
from typing import Any

from verl_patches.errors import locate_error

Message = dict[str, Any]
RowTokens = tuple[list[int], dict[str, list[int]], list[int]]
MESSAGE_FIELDS = ("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls")
_PROBE = "\x01"  # a response that no template changes
_REMEDY = "give the model's tokenizer another chat_template, or leave such rows out"


def present_fields(message: Mapping[str, Any]) -> Message:
    """Return the fields of a message that have a value, and content; parquet gives each message all fields."""
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _read_messages(given: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return messages with their present fields, and tool calls as parse_calls does."""
    messages = [present_fields(one) for one in given]
    for one in messages:
        if "tool_calls" in one:
            one["tool_calls"] = parse_calls(one["tool_calls"])
    return messages


def parse_json(value: Any, name: str) -> Any:
    """Return a value; a text is read as JSON. `name` names it in errors."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"expected {name} to be JSON, found {value!r:.60}: {error.msg}") from None


def parse_functions(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of tools or calls, each as {type, function}; given are a list or a single one, or JSON text."""
    found = parse_json(value, name)
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(one, dict) for one in found):
        raise ValueError(f"expected {name} to be a list of objects, found {found!r:.60}")
    return [{"type": "function", "function": one} if "name" in one else one for one in found]


def parse_calls(value: Any) -> list[dict[str, Any]]:
    """Return tool calls as parse_functions does, with their arguments read from JSON text."""
    calls = []
    for call in parse_functions(value, "tool_calls"):
        if not isinstance(function := call.get("function"), dict) or not function.get("name"):
            raise ValueError(f"expected a function with a name in tool_calls, found {call!r:.60}")
        arguments = parse_json(function.get("arguments") or {}, "the arguments of tool_calls")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def render(tokenizer: Any, messages: list[Message], tools: Any = None, for_answer: bool = True) -> str:
    """Return messages as the chat template writes them; `for_answer`: with the generation prompt at the end."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=for_answer, tokenize=False)
    except Exception as error:  # a template may raise anything
        trace = "".join(traceback.format_exception(error))
        text = locate_error(f"{type(error).__name__}: {str(error)[:200]}", trace, (tokenizer.name_or_path,))
        raise ValueError(f"the chat template failed: {text}") from None


def split_text(tokenizer: Any, messages: list[Message], tools: Any = None) -> tuple[str, str]:
    """Return the text of the prompt, with the generation prompt, and the text that the last message adds to it."""
    messages = _with_rendered_arguments(tokenizer, messages, tools)
    *prompt, response = messages
    head, bare = (render(tokenizer, prompt, tools, for_answer) for for_answer in (True, False))
    whole = render(tokenizer, messages, tools, for_answer=False)
    if not whole.startswith(head):
        same = len(commonprefix((whole, head)))
        places = f"{head[same:]!r:.60} at the end of the prompt, found {whole[same:]!r:.60} in the whole conversation"
        raise ValueError(f"the chat template writes {places}; expected the same text: {_REMEDY}")
    if head == bare:  # answers have no header ([INST] templates), or one that would be trained with them
        probed = render(tokenizer, [*prompt, {"role": "assistant", "content": _PROBE}], tools, for_answer=False)
        if header := probed[len(commonprefix((head, probed))) :].partition(_PROBE)[0].strip():
            text = f"the chat template ignores add_generation_prompt: {header!r:.60} would be trained as a response"
            raise ValueError(f"{text}; {_REMEDY}")
    for name in parts_left_out(tokenizer, messages, tools, whole, whole[len(commonprefix((whole, bare))) :]):
        raise ValueError(f"the chat template leaves out or changes {name}; {_REMEDY}")
    return head, whole[len(head) :]


def _squeezed(text: str) -> str:
    return "".join(text.split())  # templates add and strip blanks


def parts_left_out(tokenizer: Any, messages: list[Message], tools: Any, whole: str, answer: str) -> Iterator[str]:
    """Yield what the text of a conversation lacks; `answer` is the part of its last message.

    Reasoning and blanks of earlier answers may be left out, and so may tool_call_id and name of tool results that only
    repeat those of the calls, in the same order.
    """

    def matters(messages: list[Message], tools: Any) -> bool:
        try:
            return render(tokenizer, messages, tools, for_answer=False) != whole
        except ValueError:
            return True

    text, last = _squeezed(whole), messages[-1]
    for number, one in enumerate(messages):
        content, emptied = one.get("content") or "", {**one, "content": ""}
        exact = one is last or one["role"] in ("system", "user")  # others may be written as JSON, or without reasoning
        if _squeezed(content) not in (_squeezed(answer) if one is last else text):
            if exact or not matters([*messages[:number], emptied, *messages[number + 1 :]], tools):
                yield f"the content {content!r:.60} of role {one['role']}"
    calls = [call for one in messages for call in one.get("tool_calls", ())]
    called = {"tool_call_id": [call.get("id") for call in calls], "name": [call["function"]["name"] for call in calls]}
    for name in sorted({name for one in messages for name in one} - {"role", "content"}):
        found = [one[name] for one in messages if name in one]
        if found == called.get(name, [])[: len(found)]:
            continue
        changed = [last] if name in last else messages
        without = [{key: one[key] for key in one if key != name or one not in changed} for one in messages]
        if not matters(without, tools):
            yield name
    if tools and not matters(messages, None):
        yield "tools"
    unsaid = [name for call in calls if (name := call["function"]["name"]) not in str(call.get("id"))]
    if unsaid and not matters([_with_renamed_calls(one) for one in messages], tools):  # Kimi-K2's writes ids alone
        advice = "the template writes only the call's id; give ids such as functions.NAME:0"
        yield f"the function {unsaid[0]!r:.60} of tool_calls ({advice})"


def _with_renamed_calls(message: Message) -> Message:
    calls = message.get("tool_calls", ())
    renamed = [{**call, "function": {**call["function"], "name": _PROBE}} for call in calls]
    return {**message, "tool_calls": renamed} if renamed else message


def _with_rendered_arguments(tokenizer: Any, messages: list[Message], tools: Any) -> list[Message]:
    """Return messages with arguments of calls as JSON text where the template writes that as it is, else as values.

    Templates differ: DeepSeek's joins texts; others write a value as JSON, and would write a text as quoted JSON.
    """
    texts, changed = list[str](), list[Message]()
    for one in messages:
        calls = []
        for call in one.get("tool_calls", ()):
            texts.append(json.dumps(call["function"]["arguments"], ensure_ascii=False))
            calls.append({**call, "function": {**call["function"], "arguments": texts[-1]}})
        changed.append({**one, "tool_calls": calls} if calls else one)
    with suppress(ValueError):  # the template may need values
        if texts and all(one in render(tokenizer, changed, tools, for_answer=False) for one in texts):
            return changed
    return messages


def split_tokens(tokenizer: Any, messages: list[Message], tools: Any = None) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and of the response with one end token."""
    head, rest = split_text(tokenizer, messages, tools)
    prompt, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (head, head + rest))
    if whole[: len(prompt)] != prompt:
        places = f"the end of the prompt, {head[-20:]!r}, and the begin of the response, {rest[:20]!r}"
        raise ValueError(f"the tokenizer joins {places}, to one token; remove leading blanks of the response")
    return prompt, _with_end(tokenizer, whole[len(prompt) :])


def _with_end(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return the tokens to the last end token; one is added where other text follows it, or there is none."""
    end = tokenizer.eos_token_id
    size = len(ids) - ids[::-1].index(end) if end in ids else 0
    if not size or tokenizer.decode(ids[size:]).strip():
        return [*ids, end]
    return ids[:size]


def row_tokens(tokenizer: Any, row: Mapping[str, Any]) -> RowTokens:
    """Return the tokens of a row's prompt, those of the response in each column, and the end of each step.

    The prompt of raw text is its first token. Steps are encoded one by one, so that each ends with a token.
    """
    tools = parse_functions(row["tools"], "tools") if row.get("tools") else None
    if "text" in row:
        if tools:
            raise ValueError("raw text is trained without tools; remove column tools, or give messages")
        ids = tokenizer.encode(row["text"])
        ids += [tokenizer.eos_token_id] if ids[-1] != tokenizer.eos_token_id or len(ids) < 2 else []
        return ids[:1], {"text": ids[1:]}, []
    if "messages" in row:
        messages = _read_messages(row["messages"])
        if (role := messages[-1]["role"]) != "assistant":
            raise ValueError(f"expected the last message of messages to have role assistant, found {role}")
        ids, response = split_tokens(tokenizer, messages, tools)
        return ids, {"response": response}, []
    prompt = _read_messages(row["prompt"])
    if "steps" in row:
        return _step_tokens(tokenizer, prompt, row["steps"], tools)
    ids, responses = list[int](), dict[str, list[int]]()
    for name in (name for name in ("response", "chosen", "rejected") if name in row):
        ids, responses[name] = split_tokens(tokenizer, [*prompt, {"role": "assistant", "content": row[name]}], tools)
    return ids or tokenizer.encode(render(tokenizer, prompt, tools), add_special_tokens=False), responses, []


def _step_tokens(tokenizer: Any, prompt: list[Message], steps: list[str], tools: Any) -> RowTokens:
    content = "".join(steps)
    head, rest = split_text(tokenizer, [*prompt, {"role": "assistant", "content": content}], tools)
    before, found, after = rest.partition(content)
    if not found:
        raise ValueError(f"the chat template changes the steps, {content!r:.60}; {_REMEDY}")
    texts = head, before + steps[0], *steps[1:], after
    ids, *encoded, last = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    whole = [*chain.from_iterable(encoded), *_with_end(tokenizer, last)]
    return ids, {"steps": whole}, [*accumulate(map(len, encoded))]
