"""What a configuration would do, as plain data and as text: ranks, groups, checks, patch rows, environment, commands.

Starts nothing and writes nothing; torch and verl are not imported.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from verl_patches.cluster import environment
from verl_patches.cluster.checkouts import LINE, Trees, verl_check
from verl_patches.cluster.checks import Check, check_config, hf_config_of, model_shape_of
from verl_patches.cluster.compose import CONFIGS_DIR
from verl_patches.cluster.memory_plan import memory_plan, memory_rows
from verl_patches.layout.of_config import rollout_layout_of, train_layout_of, world_size
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.patching.prelude_line import PLACES
from verl_patches.patching.spec import PatchSpec
from verl_patches.training.engine_arguments import explain

DRIVER_MODULE = "verl_patches.main_grpo"
_SIZED = ("layers", "train experts", "rollout experts")  # checks without which no rank's bytes can be told
_SET_IN = {"workers": "driver, workers", "driver": "driver", "node": "each worker"}
TRAIN_GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
ROLLOUT_GROUPS = ("tp", "instance", "instance-dp", "ep")


def driver_command(config_name: str, overrides: Sequence[str]) -> list[str]:
    """The command line of the driver process, started by the launcher with the run's environment."""
    return [sys.executable, "-m", DRIVER_MODULE, "--config-name", config_name, *overrides]


def build_plan(
    config: DictConfig,
    config_name: str,
    overrides: Sequence[str],
    rows: Iterable[PatchSpec],
    configs_dir: Path = CONFIGS_DIR,
    trees: Trees | None = None,
) -> dict[str, Any]:
    """Everything a run of `config` would use, as JSON-ready data; `ok` is false if any check failed.

    `rows` is the catalogue. Keys: config, ok, checks, train, rollout (None where that layout cannot be built),
    memory (memory_plan.py; None without layouts), patches, environment, commands. Ranks and groups are whole lists.
    Raises ConfigError for switches that name no row.
    """
    checks = [*check_config(config, configs_dir), _verl(config.recipe.line, trees or Trees()),
              *_engine(config, configs_dir)]
    model = model_shape_of(config, configs_dir)
    built = {check.name: check.ok for check in checks}
    train = rollout = None
    if built["train layout"]:
        train = _train_side(train_layout_of(config), model, built["layers"], built["train experts"])
    if built["rollout layout"]:
        rollout = _rollout_side(rollout_layout_of(config), model, built["rollout experts"])
    patches = patch_table(config, rows)
    sized = train and rollout and all(built[name] for name in _SIZED)
    return {
        "config": config_name,
        "ok": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "train": train,
        "rollout": rollout,
        "memory": memory_plan(config, model, [row["id"] for row in patches if row["on"]]) if sized else None,
        "patches": patches,
        "environment": [asdict(variable) for variable in environment.derive(config, trees=trees)],
        "commands": commands(config, config_name, overrides, trees),
    }


def _verl(line: str, trees: Trees) -> Check:
    """Any verl will do for a plan; a start wants the line's own."""
    fits, said = verl_check(line, trees)
    return Check("verl", True, said if fits else f"a start is refused: {said}", note=not fits)


def _engine(config: DictConfig, configs_dir: Path) -> list[Check]:
    """Line a3: what the training engine refuses of the configuration and the model, each by name."""
    if config.recipe.line != LINE:
        return []
    rows = explain(config, hf_config_of(config, configs_dir))
    refused = [Check("engine arguments", False, f"{row.key} is {row.value!r}: {row.why}")
               for row in rows if row.how == "refused"]
    return refused or [Check("engine arguments", True,
                             f"none of {len(rows)} keys is refused; config --explain says what each becomes")]


def _train_side(layout: ParallelLayout, model: Any, layers_fit: bool, experts_fit: bool) -> dict[str, Any]:
    stages = range(layout.pp) if layers_fit else ()
    layers = [list(layout.stage_layers(stage, model.num_hidden_layers)) for stage in stages]
    groups = {name: layout.groups(name) for name in TRAIN_GROUPS if layout.size(name) > 1}
    return {"layout": str(layout), "groups": groups, "layers": layers,
            "ranks": _ranks(layout, ("tp", "dp", "pp", "ep"), model.n_routed_experts if experts_fit else None)}


def _rollout_side(layout: ParallelLayout, model: Any, experts_fit: bool) -> dict[str, Any]:
    groups = {name: layout.groups(name) for name in ROLLOUT_GROUPS}
    return {"layout": str(layout), "instances": layout.edp, "dp_per_instance": layout.dp // layout.edp,
            "groups": {name: found for name, found in groups.items() if len(found[0]) > 1},
            "ranks": _ranks(layout, ("edp", "dp", "tp"), model.n_routed_experts if experts_fit else None, True)}


def _ranks(layout: ParallelLayout, axes: tuple[str, ...], experts: int | None,
           rest_on_last: bool = False) -> list[dict[str, Any]]:  # fmt: skip
    found = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        entry: dict[str, Any] = {"rank": rank, **{axis: getattr(place, axis) for axis in axes}}
        if experts is not None:
            held = layout.local_experts(rank, experts, rest_on_last)
            entry["experts"] = [held.start, held.stop - 1]
        found.append(entry)
    return found


def patch_table(config: DictConfig, rows: Iterable[PatchSpec]) -> list[dict[str, str]]:
    """One {id, on, reason, kind, target} a row of the catalogue for the line, platform and patches of `config`."""
    rows, switches = tuple(rows), environment.switches_of(config)
    switches.check_against({row.id: row for row in rows})
    table = []
    for row in rows:
        wanted, reason = switches.decide(row)
        table.append({"id": row.id, "on": wanted, "reason": reason, "kind": row.kind, "target": row.target})
    return table


def commands(
    config: DictConfig, config_name: str, overrides: Sequence[str], trees: Trees | None = None
) -> list[dict[str, str]]:
    """What to type, in order: [{where, command}]; HEAD and NODE stand for addresses of the operator's nodes.

    Ray is started with this checkout and the upstream trees (the same paths on every node) before what the node's own
    PYTHONPATH holds: its workers import verl_patches, and where there are no trees they import the image's.
    """
    found, nodes, dies = [], config.trainer.nnodes, config.trainer.n_gpus_per_node
    places = [str(environment.REPOSITORY), *map(str, trees.folders if trees else ())]
    here = f"PYTHONPATH={shlex.quote(os.pathsep.join(places))}${{PYTHONPATH:+:$PYTHONPATH}} "
    if config.recipe.ray_address is not None:
        device = f""" --resources='{{"NPU": {dies}}}'""" if config.trainer.device == "npu" else ""
        quiet = "--include-dashboard=false --disable-usage-stats"
        head = here + f"ray start --head --node-ip-address=HEAD --port=6379 {quiet}"
        found.append({"where": "head node", "command": head + device})
        if nodes > 1:
            other = here + "ray start --address=HEAD:6379 --node-ip-address=NODE --disable-usage-stats"
            found.append({"where": f"each of the other {nodes - 1} nodes", "command": other + device})
    train = ["python", "-m", "verl_patches", "train", "--config-name", config_name]
    train += [*(trees.option if trees else ()), *overrides]
    found.append({"where": "head node" if found else "this machine", "command": here + shlex.join(train)})
    driver = shlex.join(driver_command(config_name, overrides))
    found.append({"where": "started by the last one, not to be typed", "command": driver})
    return found


def compact(groups: Sequence[Sequence[int]], shown: int = 3) -> str:
    """Groups in one line: "64 groups of 4: [0-3] [4-7] [8-11] ..."; a regular stride is written [0-252:4]."""
    text = " ".join(f"[{_span(group)}]" for group in groups[:shown])
    more = " ..." if len(groups) > shown else ""
    return f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(groups[0])}: {text}{more}"


def _span(ranks: Sequence[int]) -> str:
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def show(plan: dict[str, Any], config: DictConfig, console: Console) -> None:
    """Print a plan as tables."""
    console.print(
        f"[bold]{plan['config']}[/]: "
        f"{world_size(config)} ranks on {config.trainer.nnodes} node(s) x {config.trainer.n_gpus_per_node}; "
        f"line {config.recipe.line}, platform {config.recipe.platform}",
        highlight=False,
    )
    _table(console, "checks", ("check", "", "detail"),
           [(c["name"], "note" if c["note"] else "ok" if c["ok"] else "FAILED", c["detail"]) for c in plan["checks"]])
    for side in ("train", "rollout"):
        if plan[side]:
            _show_side(console, side, plan[side])
    if plan["memory"]:
        _table(console, *memory_rows(plan["memory"]))
    on = [row for row in plan["patches"] if row["on"]]
    _table(console, f"patches: {len(on)} of {len(plan['patches'])} rows on", ("id", "kind", "target", "why on"),
           [(row["id"], row["kind"], row["target"], row["reason"]) for row in on])
    _table(console, "environment", ("name", "value", "set in", "reason", "read by"),
           [(v["name"], v["value"], _SET_IN[v["where"]], v["reason"], v["read_by"]) for v in plan["environment"]])
    console.print(PLACES, highlight=False, soft_wrap=True)
    refused = [c["name"] for c in plan["checks"] if not c["ok"] or c["detail"].startswith("a start is refused")]
    console.print(f"not to be typed yet, a start is refused (checks above: {', '.join(refused)}):" if refused
                  else "commands to type, in this order:", style="bold", highlight=False)
    if any("HEAD" in command["command"] for command in plan["commands"]):
        console.print("HEAD and NODE stand for addresses of your nodes that the other nodes reach, not 127.0.0.1. Each "
                      "node needs the folders of PYTHONPATH and the model's; vllm, vllm-ascend and torch_npu are those "
                      "installed there", highlight=False)
    for command in plan["commands"]:
        console.print(f"[bold]{command['where']}[/]:", highlight=False)
        console.print(f"  {command['command']}", highlight=False, markup=False, soft_wrap=True)


def _show_side(console: Console, side: str, data: dict[str, Any]) -> None:
    lines = [(name, compact(groups)) for name, groups in data["groups"].items()]
    lines += [
        (f"stage {number}", f"layers {held[0]}-{held[-1]} ({len(held)})")
        for number, held in enumerate(data.get("layers", ()))
        if held
    ]
    last = len(data["ranks"]) - 1
    for entry in (data["ranks"][0], data["ranks"][last]) if last else data["ranks"]:
        where = " ".join(f"{key}{value}" for key, value in entry.items() if key not in ("rank", "experts"))
        held = entry.get("experts")
        lines.append((f"rank {entry['rank']}", where + (f" experts {held[0]}-{held[1]}" if held else "")))
    _table(console, f"{side}: {data['layout']}", ("", "ranks"), lines)


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell, style="red" if cell == "FAILED" else "") for cell in row])
    console.print(table)
