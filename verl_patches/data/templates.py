"""prompt_type of `data build`: how the text of a user message is made. A run adds the chat template of its tokenizer.

Templates are Jinja in a sandbox and only of the nodes in _ALLOWED: no calls, no arithmetic, no loop in a loop. So a
loop has at most as many turns as a row has characters, and rendering stops at MAX_CHARS of text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import ConfigError
from verl_patches.values import read_yaml, unknown_key

TEMPLATES = REPOSITORY / "data" / "templates.yaml"  # {name: {user: Jinja, system: text}}
MODEL = "model"  # messages as they are
MAX_CHARS, MAX_TEMPLATE_CHARS = 4 << 20, 64 << 10
_ALLOWED = set(
    "Template Output TemplateData Name Const Getattr Getitem Filter If For Compare Operand And Or Not Test "
    "CondExpr".split()
)
_FILTERS = {"trim", "upper", "lower", "capitalize", "default", "first", "last", "length", "string", "int", "tojson"}


class Template:
    """The Jinja text of a user message, and the system message or None. ConfigError for a text that may not be used."""

    def __init__(self, user: str, system: str | None = None):
        environment, self.system = ImmutableSandboxedEnvironment(undefined=StrictUndefined), system
        try:
            if len(user) > MAX_TEMPLATE_CHARS:
                raise ValueError(f"it has more than {MAX_TEMPLATE_CHARS} characters")
            tree = environment.parse(user)
            for node in (tree, *tree.find_all(nodes.Node)):
                name = node.name if isinstance(node, nodes.Filter) else type(node).__name__
                if name not in (_FILTERS if isinstance(node, nodes.Filter) else _ALLOWED):
                    allowed = f"names, if, for and {', '.join(sorted(_FILTERS))} are"
                    raise ValueError(f"{name.lower()} is not allowed; {allowed}")
            for loop in tree.find_all(nodes.For):
                if loop.find(nodes.For) or loop.recursive:
                    raise ValueError("a loop in a loop is not allowed")
            self._template = environment.from_string(user)
        except (TemplateError, ValueError, RecursionError) as error:
            raise ConfigError(f"prompt_type: expected Jinja, found {user!r:.80}: {error}") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text; ValueError where it is too long, or a value is missing."""
        parts, chars = [], 0
        try:
            for part in self._template.generate(values):
                parts.append(part)
                chars += len(part)
                if chars > MAX_CHARS:
                    raise ValueError(f"prompt_type makes more than {MAX_CHARS} characters of this row")
        except (TemplateError, TypeError, ArithmeticError) as error:
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
        return Template(**found[prompt_type])
    fault = unknown_key(prompt_type, {MODEL: 0, **found}, f"expected {MODEL}, {', '.join(found)} or a Jinja text")
    raise ConfigError(f"prompt_type is {prompt_type:.80}; {fault.partition('; ')[2]}")
