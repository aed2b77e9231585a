"""How a plan ends: one verdict, and commands that lead on from it. No torch.

Where a layout, a batch or memory does not fit, the search that is named has been run, so it works when it is typed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from verl_patches.config.compose import keys_of
from verl_patches.config.files import check_files
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import world_size
from verl_patches.planning.search import DIES, NODE_DIES, NoLayout, search
from verl_patches.planning.step_plan import Workload
from verl_patches.upstream.checkouts import Trees

_PLAN = ("python", "-m", "verl_patches", "plan")


def conclude(
    plan: dict[str, Any],
    config: DictConfig,
    config_name: str,
    overrides: Sequence[str],
    trees: Trees,
    workload: Workload = Workload(),  # noqa: B008 frozen
) -> dict[str, Any]:
    """{verdict, next: [{what, command}]} of a plan (`build_plan`); the first command is the one to type next."""
    checks = plan["checks"]
    failed = [check["name"] for check in checks if not check["ok"]]
    if failed:
        names = ", ".join(dict.fromkeys(failed))
        text = f"does not fit: {len(failed)} of {len(checks)} checks failed: {names}"
        of_files = {"hooks", *(check.name for check in check_files(config, keys_of(overrides)) if not check.ok)}
        given = [config_name, *trees.option, *workload.option, *overrides]
        ways = [] if set(failed) <= of_files else _ways_on(plan, config, given, workload)
        named = "it names" if len(failed) == 1 else "they name"
        return {"verdict": text if ways else f"{text}; next: change what {named}", "next": ways}
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


def _ways_on(
    plan: dict[str, Any], config: DictConfig, given: Sequence[str], workload: Workload
) -> list[dict[str, str]]:
    """A search that lists layouts for the dies of the configuration, or for the fewest that do; [] where none does."""
    if config.recipe.platform != "npu" or config.recipe.hardware != "a3":
        return []
    rows = [row["id"] for row in plan["patches"] if row["on"]]
    dies = min(max(world_size(config) // NODE_DIES * NODE_DIES, DIES.start), DIES.stop // NODE_DIES * NODE_DIES)
    try:
        best = search(config, rows, dies, workload)[0]
        what = f"the fastest layout for {dies} dies takes {best['total_s']:.0f} s a step (modelled)"
    except NoLayout as error:
        if error.dies is None:
            return []
        what, dies = f"no layout of this model fits on {dies} dies, some do on {error.dies}", error.dies
    except ConfigError:
        return []  # every layout is refused for another reason, which a check names
    return [{"what": what, "command": shlex.join([*_PLAN, *given, "--search", "--dies", str(dies)])}]
