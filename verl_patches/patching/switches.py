"""Read line, platform, drift policy and switched rows from the environment variable VERL_PATCHES.

    VERL_PATCHES="line=pypi,platform=cpu,drift=warn,-reshard.*,+memory.ledger"

The launcher adds the ids of the rows that the run's features need, as rows=ID:ID:...; without this all rows are on.

The prelude runs before any configuration exists, so only an environment variable reaches every process. The launcher
writes it from the composed configuration (`recipe:`).
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_patches.errors import ConfigError, our_command
from verl_patches.patching.spec import DRIFT_POLICIES, LEVELS, LINES, PLATFORMS, PatchSpec

PATCHES_VAR = "VERL_PATCHES"
DEFAULT_LINE, DEFAULT_PLATFORM = "a3", "npu"
DEFAULT_DRIFT = "strict"
_SWITCHED_OFF = "switched off by "  # begins the reason of a row that a pattern switches off
_MOST_NAMES = 5  # the most names that an error suggests


@dataclass(frozen=True)
class Switches:
    """Hold line, platform and the +id / -id patterns (fnmatch) in the order given; a later one wins.

    `drift`: policy where upstream is not as reviewed (row drifted or unsupported): strict stops the run, warn applies
    the row where it can and marks it. `rows`: ids of the rows that the run's features need; None: those of all
    features.
    """

    line: str = DEFAULT_LINE
    platform: str = DEFAULT_PLATFORM
    patterns: tuple[str, ...] = ()
    drift: str = DEFAULT_DRIFT
    rows: tuple[str, ...] | None = None

    def text(self) -> str:
        """Return the value for VERL_PATCHES; `parse_switches(s.text()) == s`."""
        drift = () if self.drift == DEFAULT_DRIFT else (f"drift={self.drift}",)
        rows = () if self.rows is None else (f"rows={':'.join(self.rows)}",)
        return ",".join((f"line={self.line}", f"platform={self.platform}", *drift, *self.patterns, *rows))

    def decide(self, spec: PatchSpec) -> tuple[bool, str]:
        """Return (wanted, reason in words) for one row."""
        if self.line not in spec.lines:
            return False, f"not for line {self.line}"
        if self.platform not in spec.all_platforms:
            return False, f"not for platform {self.platform}"
        wanted, reason = True, f"feature {spec.feature} is on" if spec.feature else f"role {spec.role}"
        if self.rows is not None and spec.id not in self.rows:
            reasons = [f"feature {spec.feature} is off"] if spec.feature else []
            reasons += [f"the level is not {LEVELS[-1]}"] if spec.role == "speed" else []
            wanted, reason = False, " or ".join(reasons) or "not a row of this run"
        for pattern in self.patterns:
            if fnmatch.fnmatchcase(spec.id, pattern[1:]):
                wanted = pattern[0] == "+"
                reason = f"{'switched on by ' if wanted else _SWITCHED_OFF}{pattern}"
        return wanted, reason

    def switched_off(self, specs: Iterable[PatchSpec]) -> list[str]:
        """Return the ids of the rows of this line and platform that are off."""
        here = [spec for spec in specs if self.line in spec.lines and self.platform in spec.all_platforms]
        return [spec.id for spec in here if not self.decide(spec)[0]]

    def check_against(self, specs: Mapping[str, PatchSpec]) -> None:
        """Refuse a pattern that names no row; ConfigError has the nearest ids."""
        for pattern in self.patterns:
            if not fnmatch.filter(specs, pattern[1:]):
                raise ConfigError(
                    f"{pattern!r} (recipe.patches or {PATCHES_VAR}) names no row of the catalogue"
                    f"{nearest_text(pattern[1:], specs)}. `{our_command('status')}` lists them."
                )


def recorded_off_ids(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the ids of the rows in a run's record that the user switched off."""
    off = (row["id"] for row in rows if row["state"] == "off" and row.get("reason", "").startswith(_SWITCHED_OFF))
    return list(dict.fromkeys(off))


def switched_off_text(ids: Sequence[str]) -> str:
    """Return a text such as "1 row off by you: row.id"; empty without any."""
    return f"{len(ids)} row{'s' if len(ids) > 1 else ''} off by you: {', '.join(ids)}" if ids else ""


def nearest_text(name: str, known: Iterable[str]) -> str:
    """Return the known names that contain `name` or are like it, as "; nearest: a, b"; empty without any."""
    import difflib

    part, names = name.strip("*.").lower(), sorted(known)
    matches = [key for key in names if part and part in key.lower()]
    matches += difflib.get_close_matches(name, names, n=_MOST_NAMES)
    unique = list(dict.fromkeys(matches))[:_MOST_NAMES]
    return f"; nearest: {', '.join(unique)}" if unique else ""


def parse_switches(text: str) -> Switches:
    """Return the switches of a value of VERL_PATCHES; ConfigError names the part that is wrong."""
    values = {"line": DEFAULT_LINE, "platform": DEFAULT_PLATFORM, "drift": DEFAULT_DRIFT}
    allowed = {"line": LINES, "platform": PLATFORMS, "drift": DRIFT_POLICIES}
    patterns, rows = [], None
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if part[0] in "+-" and len(part) > 1 and not equals:
            patterns.append(part)
        elif key == "rows" and equals:
            rows = tuple(filter(None, value.split(":")))
        elif key in allowed and value in allowed[key]:
            values[key] = value
        else:
            words = ", ".join(f"{name}={'|'.join(values)}" for name, values in allowed.items())
            raise ConfigError(
                f"{PATCHES_VAR}: cannot read {part!r} in {text!r}; expected {words}, rows=ID:ID, +row.id or "
                "-row.id, separated by commas"
            )
    return Switches(patterns=tuple(patterns), rows=rows, **values)


def switches_from_environment() -> Switches:
    """Return the switches of this process; an unset variable means production: line a3 on npu."""
    return parse_switches(os.environ.get(PATCHES_VAR, ""))
