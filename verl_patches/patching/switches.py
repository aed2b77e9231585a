"""What is asked for: line, platform and single rows, from an argument or the one environment variable VERL_PATCHES.

    VERL_PATCHES="line=pypi,platform=cpu,-reshard.*,+memory.ledger"

The prelude runs before any configuration exists, so this is the only switch that reaches every process. The launcher
writes it from the composed configuration (`recipe:`).
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass

from verl_patches.errors import ConfigError
from verl_patches.patching.spec import LINES, PLATFORMS, PatchSpec

VARIABLE = "VERL_PATCHES"
DEFAULT_LINE, DEFAULT_PLATFORM = "a3", "npu"


@dataclass(frozen=True)
class Switches:
    """Line, platform and the +id / -id patterns (fnmatch) in the order given; a later one wins."""

    line: str = DEFAULT_LINE
    platform: str = DEFAULT_PLATFORM
    patterns: tuple[str, ...] = ()

    def text(self) -> str:
        """The form that VERL_PATCHES takes; `parse(s.text()) == s`."""
        return ",".join((f"line={self.line}", f"platform={self.platform}", *self.patterns))

    def decide(self, spec: PatchSpec) -> tuple[bool, str]:
        """(wanted, reason in words) for one row."""
        if self.line not in spec.lines:
            return False, f"not for line {self.line}"
        if self.platform not in spec.platforms:
            return False, f"not for platform {self.platform}"
        wanted, reason = spec.default != "off", f"default {spec.default}"
        for pattern in self.patterns:
            if fnmatch.fnmatchcase(spec.id, pattern[1:]):
                wanted, reason = pattern[0] == "+", f"switched by {pattern}"
        return wanted, reason

    def check_against(self, specs: Mapping[str, PatchSpec]) -> None:
        """ConfigError for a pattern that names no row, with the nearest ids."""
        for pattern in self.patterns:
            if not fnmatch.filter(specs, pattern[1:]):
                near = difflib.get_close_matches(pattern[1:], specs, n=3) or sorted(specs)[:3]
                raise ConfigError(
                    f"{VARIABLE}: {pattern!r} names no row of the catalogue; nearest: {', '.join(near)}. "
                    "`python -m verl_patches status` lists them."
                )


def parse(text: str) -> Switches:
    """Switches from the text form; ConfigError names the part that is wrong."""
    values = {"line": DEFAULT_LINE, "platform": DEFAULT_PLATFORM}
    allowed = {"line": LINES, "platform": PLATFORMS}
    patterns = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if part[0] in "+-" and len(part) > 1 and not equals:
            patterns.append(part)
        elif key in allowed and value in allowed[key]:
            values[key] = value
        else:
            raise ConfigError(
                f"{VARIABLE}: cannot read {part!r} in {text!r}; expected line={'|'.join(LINES)}, "
                f"platform={'|'.join(PLATFORMS)}, +row.id or -row.id, separated by commas"
            )
    return Switches(values["line"], values["platform"], tuple(patterns))


def from_environment() -> Switches:
    """Switches of this process; an unset variable means production: line a3 on npu."""
    return parse(os.environ.get(VARIABLE, ""))
