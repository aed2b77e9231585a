"""How a plan ends: one verdict, and commands that lead on from it. No torch.

Where a layout, a batch or memory does not fit, the search that is named has been run, so it works when it is typed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from verl_patches.config.resolve import LayoutError
from verl_patches.errors import ConfigError
from verl_patches.planning.search import DIES, NODE_DIES, NoLayout, search
from verl_patches.planning.step_plan import Workload
from verl_patches.spec import Rules, RunSpec

_PLAN = ("python", "-m", "verl_patches", "plan")


def conclude(
    plan: dict[str, Any],
    run: RunSpec,
    rules: Rules,
    config_name: str,
    overrides: Sequence[str],
    workload: Workload = Workload(),  # noqa: B008 frozen
) -> dict[str, Any]:
    """{verdict, next: [{what, command}]} of a plan (`build_plan`); the first command is the one to type next."""
    checks = plan["checks"]
    if failed := [check["name"] for check in checks if not check["ok"]]:
        of_files = {check.name for rule in rules.files for check in rule(run) if not check.ok}
        given = [config_name, *run.trees.option, *workload.option, *overrides]
        ways = [] if set(failed) <= of_files else _ways_on(run, rules, given, workload)
        return _refused(failed, len(checks), ways)
    text = f"fits: all {len(checks)} checks hold"
    for check in checks:
        if check["detail"].startswith("a start is refused"):
            text += f", but a start is refused: see the note on {check['name']}"
        elif check["note"] and check["name"] == "host memory":
            need = plan["memory"]["host"]["node_bytes"] / 2**30
            text += f"; HOST MEMORY NOT COMPARED: a node needs {need:.0f} GiB (recipe.memory.host_gib)"
    typed = [each for each in plan["commands"] if "not to be typed" not in each["where"]]
    text += f"; next: the {len(typed)} commands above" if len(typed) > 1 else "; next: the command above"
    return {"verdict": text, "next": [{"what": each["where"], "command": each["command"]} for each in typed]}


def conclude_without_layout(
    error: LayoutError,
    base: RunSpec,
    rules: Rules,
    config_name: str,
    overrides: Sequence[str],
    workload: Workload = Workload(),  # noqa: B008 frozen
) -> dict[str, Any]:
    """Return `conclude` of a configuration whose ranks cannot be split as it says; `base`: with a layout that can."""
    given = [config_name, *base.trees.option, *workload.option, *overrides]
    return _refused([error.side], 1, _ways_on(base, rules, given, workload))


def _refused(failed: Sequence[str], checks: int, ways: list[dict[str, str]]) -> dict[str, Any]:
    text = f"does not fit: {len(failed)} of {checks} checks failed: {', '.join(dict.fromkeys(failed))}"
    named = "it names" if len(failed) == 1 else "they name"
    return {"verdict": text if ways else f"{text}; next: change what {named}", "next": ways}


def _ways_on(run: RunSpec, rules: Rules, given: Sequence[str], workload: Workload) -> list[dict[str, str]]:
    """A search that lists layouts for the dies of the configuration, or for the fewest that do; [] where none does."""
    if run.platform != "npu" or run.recipe.hardware != "a3":
        return []
    dies = min(max(run.world_size // NODE_DIES * NODE_DIES, DIES.start), DIES.stop // NODE_DIES * NODE_DIES)
    try:
        best = search(run, rules.sizes, dies, workload)[0]
        what = f"the fastest layout for {dies} dies takes {best['total_s']:.0f} s a step (modelled)"
    except NoLayout as error:
        if error.dies is None:
            return []
        what, dies = f"no layout of this model fits on {dies} dies, some do on {error.dies}", error.dies
    except ConfigError:
        return []  # every layout is refused for another reason, which a check names
    return [{"what": what, "command": shlex.join([*_PLAN, *given, "--search", "--dies", str(dies)])}]
