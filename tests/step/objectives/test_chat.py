"""Test the split of conversations by chat templates of several kinds: what is trained, and what is refused by name."""

import pytest

from verl_patches.model.tiny import CHAT_TEMPLATE, _make_tokenizer, tiny_config
from verl_patches.step.objectives.chat import row_tokens

# a template with tools, calls and reasoning; a call's arguments are written as JSON, as in Qwen's
TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT_ARGUMENTS = TOOLS_TEMPLATE.replace(
    "{{ c.function.name }} {{ c.function.arguments | tojson }}", "{{ c.function.name + ' ' + c.function.arguments }}"
)
THINK = CHAT_TEMPLATE.replace("'<|assistant|>' }}{% endif", "'<|assistant|><think>\n' }}{% endif")
STRIPS_THINK = THINK.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}")
NO_HEADER = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_GENERATION_PROMPT = "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
NO_SYSTEM = CHAT_TEMPLATE.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
)
NO_RESULTS = TOOLS_TEMPLATE.replace("for m in messages %}", "for m in messages if m.role != 'tool' %}")
USER = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "4 C"}
TOOLS = '[{"type": "function", "function": {"name": "weather"}}]'
SHOWN_TOOLS = (
    '<|begin|><|system|>[{"type": "function", "function": {"name": "weather"}}]<|user|>Weather in Oslo?<|assistant|>'
)


def say(text, **fields):
    return {"role": "assistant", "content": text, **fields}


@pytest.fixture
def tokenizer():
    return _make_tokenizer(tiny_config())


@pytest.fixture
def split(tokenizer):
    """Return split(template, *messages) -> the texts of the prompt and the response that are trained."""

    def texts(template, *messages, tools=None):
        tokenizer.chat_template = template
        prompt, responses, _ = row_tokens(tokenizer, {"messages": messages, "tools": tools})
        return tokenizer.decode(prompt), tokenizer.decode(responses["response"])

    return texts


def test_calls_results_tools_and_reasoning_are_trained_as_the_template_writes_them(split):
    call = '<call>weather {"city": "Oslo"}</call><|end|>'
    for template in (TOOLS_TEMPLATE, TEXT_ARGUMENTS):  # and values of arguments are not quoted twice
        assert split(template, USER, CALLS, tools=TOOLS) == (SHOWN_TOOLS, call)
        assert split(template, USER, say("I look.", tool_calls=[CALL]), tools=TOOLS)[1] == f"I look.{call}"
    prompt, response = split(TOOLS_TEMPLATE, USER, CALLS, RESULT, say("4 degrees."), tools=TOOLS)
    assert (prompt, response) == (f"{SHOWN_TOOLS}{call}\n<|user|>4 C<|assistant|>", "4 degrees.<|end|>")
    assert (
        split(TOOLS_TEMPLATE, USER, say("42", reasoning_content="6 x 7"))[1] == "<think>\n6 x 7\n</think>\n\n42<|end|>"
    )


def test_a_prompt_beside_a_response_may_have_flat_calls(tokenizer):
    tokenizer.chat_template = TOOLS_TEMPLATE
    called = {**CALLS, "tool_calls": [CALL["function"]]}
    prompt, responses, _ = row_tokens(tokenizer, {"prompt": [USER, called, USER], "response": "4 C"})
    assert '<call>weather {"city": "Oslo"}</call><|end|>' in tokenizer.decode(prompt)
    assert tokenizer.decode(responses["response"]) == "4 C<|end|>"


def test_a_begin_that_the_generation_prompt_has_is_not_trained_twice(split):
    answer = say("<think>\n1 + 1\n</think>\n\n2")
    assert split(THINK, USER, answer) == (
        "<|begin|><|user|>Weather in Oslo?<|assistant|><think>\n",
        "1 + 1\n</think>\n\n2<|end|>",
    )
    assert split(CHAT_TEMPLATE, USER, answer)[1] == "<think>\n1 + 1\n</think>\n\n2<|end|>"


def test_results_as_json_and_earlier_answers_without_reasoning_are_accepted(split):
    """Check what published templates do to messages that are no response."""
    as_json = TOOLS_TEMPLATE.replace(
        "{{ m.content or '' }}", "{{ m.content | tojson if m.role == 'tool' else m.content or '' }}"
    )
    assert '"4 \\"C\\""' in split(as_json, USER, CALLS, {**RESULT, "content": '4 "C"'}, say("x"))[0]
    strips = CHAT_TEMPLATE.replace(
        "message['content'] }}",
        "(message['content'].split('</think>')[-1] if not loop.last else message['content']) }}",
    )
    assert (
        split(strips, USER, say("<think>a</think>b"), USER, say("<think>c</think>d"))[1] == "<think>c</think>d<|end|>"
    )


def test_a_template_without_headers_needs_no_generation_prompt(split):
    assert split(NO_HEADER, USER, say("4")) == ("<|begin|>[INST] Weather in Oslo? [/INST]", " 4<|end|>")


@pytest.mark.parametrize(("template", "messages", "tools", "words"), [
    (CHAT_TEMPLATE, [USER, say("x", tool_calls=[CALL])], None, "leaves out or changes tool_calls"),
    (CHAT_TEMPLATE, [USER, say("x")], TOOLS, "leaves out or changes tools"),
    (CHAT_TEMPLATE, [USER, say("x", reasoning_content="r")], None, "leaves out or changes reasoning_content"),
    (TOOLS_TEMPLATE, [{**USER, "name": "Ann"}, say("x")], None, "leaves out or changes name"),
    (TOOLS_TEMPLATE, [USER, CALLS, {**RESULT, "tool_call_id": "c2"}, say("x")], None, "or changes tool_call_id"),
    (TOOLS_TEMPLATE, [USER, say("x", tool_calls=[{"id": "c1"}])], None, "a function with a name"),
    (NO_SYSTEM, [{"role": "system", "content": "Brief."}, USER, say("x")], None, "the content 'Brief.' of role system"),
    (NO_RESULTS, [USER, CALLS, RESULT, say("x")], None, "changes the content '4 C' of role tool"),
    (NO_GENERATION_PROMPT, [USER, say("x")], None, r"prompt: '<\|assistant\|>' would be trained"),
    (THINK, [USER, say("x")], None, r"writes '<think>\\n' at the end of the prompt, found 'x"),
    (STRIPS_THINK, [USER, say("<think>\n1\n</think>x")], None, "at the end of the prompt, found 'x"),
    (STRIPS_THINK.replace("<think>\n' }}", "' }}"), [USER, say("<think>1</think>x")], None, "the content '<think>1"),
    (CHAT_TEMPLATE + "{{ raise_exception('no') }}", [USER, say("x")], None, "template failed: TemplateError: no"),
    (CHAT_TEMPLATE, [say("x"), USER], None, "to have role assistant, found user"),
])  # fmt: skip
def test_what_a_template_leaves_out_or_trains_wrongly_is_refused_by_name(split, template, messages, tools, words):
    with pytest.raises(ValueError, match=words) as error:
        split(template, *messages, tools=tools)
    assert "\n" not in str(error.value)


def test_a_response_that_joins_the_prompts_last_token_is_refused(split, tokenizer):
    """Check a prompt that ends in the first letter of a token, and a response that begins with its second."""
    joined = next(t for t in tokenizer.get_vocab() if len(t) == 2 and t.isalpha() and t.isascii())
    template = CHAT_TEMPLATE.replace("'<|' + message['role'] + '|>'", f"'<|' + message['role'] + '|>{joined[0]}'")
    template = template.replace("'<|assistant|>' }}", f"'<|assistant|>{joined[0]}' }}}}")
    assert split(template, USER, say(" x"))[1].endswith("x<|end|>")
    with pytest.raises(ValueError, match="joins the end of the prompt"):
        split(template, USER, say(joined[1]))


def test_steps_are_encoded_alone_and_the_templates_text_around_them_is_kept(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ eos_token }}", "!{{ eos_token }}")
    prompt, responses, ends = row_tokens(tokenizer, {"prompt": [USER], "steps": ["12", "ab"]})
    assert tokenizer.decode(prompt).endswith("<|assistant|>")
    steps = [tokenizer.encode(step, add_special_tokens=False) for step in ("12", "ab")]
    assert responses["steps"][: ends[1]] == [*steps[0], *steps[1]] and ends[0] == len(steps[0])
    assert tokenizer.decode(responses["steps"][ends[1] :]) == "!<|end|>"
