"""prompt_type of `data build`: how the text of a user message is made. A run adds the chat template of its tokenizer.

Templates are Jinja in a sandbox and only of the nodes in _ALLOWED: no calls, no arithmetic, no loop in a loop. So a
loop has at most as many turns as a row has characters, and rendering stops at MAX_CHARS of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import ConfigError
from verl_patches.values import unknown_key
from verl_patches.yaml_files import read_yaml

TEMPLATES = REPOSITORY / "data" / "templates.yaml"  # {name: {user: Jinja, system: text}}
MODEL = "model"  # messages as they are
MAX_CHARS = 4 << 20
MAX_TEMPLATE_CHARS = 64 << 10
_ALLOWED = tuple(
    getattr(nodes, name)
    for name in "Template Output TemplateData Name Const Getattr Getitem Filter If For Compare Operand And Or Not Test "
    "CondExpr Concat Keyword".split()
)
_FILTERS = {
    "trim",
    "upper",
    "lower",
    "title",
    "capitalize",
    "default",
    "first",
    "last",
    "length",
    "string",
    "int",
    "tojson",
}
_OF_CHATS = re.compile(
    "(qwen|deepseek|llama|chatglm|glm|baichuan|mixtral|mistral|gemma|phi|cpm|minicpm|hunyuan|yi|intern)"
)


class Template:
    """The Jinja text of a user message, and the system message or None. ConfigError for a text that may not be used."""

    def __init__(self, user: str, system: str | None = None, where: str = "prompt_type"):
        self.system = system
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            if len(user) > MAX_TEMPLATE_CHARS:
                raise ValueError(f"at most {MAX_TEMPLATE_CHARS} characters")
            _check(environment.parse(user))
            self._template = environment.from_string(user)
        except RecursionError:
            raise ConfigError(f"{where}: its Jinja is nested too deep") from None
        except (TemplateError, ValueError) as error:
            raise ConfigError(f"{where}: expected Jinja with {error}, found {user!r:.80}") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text; ValueError where it is too long, or a value is missing."""
        parts, chars = [], 0
        try:
            for part in self._template.generate(values):
                parts.append(part)
                chars += len(part)
                if chars > MAX_CHARS:
                    raise ValueError(f"prompt_type makes more than {MAX_CHARS} characters of this row")
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"prompt_type: {error}") from None
        return "".join(parts)


def template_of(prompt_type: str) -> Template | None:
    """The template that a prompt_type names or is, None for the model's own. ConfigError for neither."""
    if prompt_type == MODEL:
        return None
    if "{{" in prompt_type or "{%" in prompt_type:
        return Template(prompt_type)
    found = read_yaml(TEMPLATES)
    if prompt_type in found:
        return Template(found[prompt_type]["user"], found[prompt_type].get("system"), f"{TEMPLATES}: {prompt_type}")
    if _OF_CHATS.match(prompt_type):
        raise ConfigError(
            f"prompt_type is {prompt_type}, a chat template of MindSpeed-RL; a run applies that of the model's "
            "tokenizer: write prompt_type: model"
        )
    names = {MODEL: None, **found}
    hint = f"{', '.join(names)}, or a Jinja text with {{{{ prompt }}}}"
    raise ConfigError(f"prompt_type: {unknown_key(prompt_type, names, f'expected {hint}')}".replace("key ", "name "))


def _check(tree: nodes.Template) -> None:
    """ValueError that says what is expected, for a node that is not allowed."""
    for node, loops in _walk(tree, 0):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"names, filters, if and for alone (no {type(node).__name__.lower()})")
        if isinstance(node, nodes.Filter) and node.name not in _FILTERS:
            raise ValueError(f"the filters {', '.join(sorted(_FILTERS))} (no {node.name})")
        if isinstance(node, nodes.For) and (loops > 1 or node.recursive):
            raise ValueError("no loop in a loop")


def _walk(node: nodes.Node, loops: int) -> Iterator[tuple[nodes.Node, int]]:
    loops += isinstance(node, nodes.For)
    yield node, loops
    for child in node.iter_child_nodes():
        yield from _walk(child, loops)
