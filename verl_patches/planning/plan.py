"""What a run would use, as plain data: ranks, groups, checks, memory, patch rows, environment, commands.

Starts nothing and writes nothing; torch and verl are not imported.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_patches.config import environment
from verl_patches.config.checks import check_config
from verl_patches.config.compose import hf_config_of, keys_of, model_shape_of
from verl_patches.errors import Check
from verl_patches.layout.parallel import ParallelLayout, rollout_layout_of, train_layout_of
from verl_patches.model.mindspeed.arguments import explain
from verl_patches.patching.spec import PatchSpec
from verl_patches.planning.memory_plan import (
    MARGIN_BYTES,
    exceeding,
    followed_peaks,
    memory_plan,
    pinned_bytes,
    states_bytes,
    with_recompute,
)
from verl_patches.planning.serving import serving_plan
from verl_patches.planning.start_plan import start_plan
from verl_patches.planning.step_plan import Workload, step_sections
from verl_patches.platform import NO_DEVICE
from verl_patches.ray_nodes import ray_start
from verl_patches.upstream.checkouts import LINE, Trees, verl_check

DRIVER_MODULE = "verl_patches.main"
TRAIN_GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
ROLLOUT_GROUPS = ("tp", "instance", "instance-dp", "ep")
_SIZED = ("layers", "train experts", "rollout experts")  # checks that the memory plan needs


def driver_command(config_file: Path) -> list[str]:
    """The command line of the driver process, started by the launcher with the run's environment."""
    return [sys.executable, "-m", DRIVER_MODULE, str(config_file)]


def build_plan(
    config: DictConfig,
    config_name: str,
    overrides: Sequence[str],
    rows: Iterable[PatchSpec],
    trees: Trees,
    workload: Workload = Workload(),  # noqa: B008 frozen
) -> dict[str, Any]:
    """Everything a run of `config` would use, as JSON-ready data; `ok` is false if any check failed.

    `rows` is the catalogue. Keys: config, ok, checks, train, rollout (None where that layout cannot be built), memory
    (`memory_plan`), inference (`serving_plan`; platform npu only), step_plan's step, traffic and ports, `start_plan`
    (None without layouts), patches, environment, commands. Ranks and groups are whole lists.
    Files named in `overrides` must exist here; those that only the config names may be on other machines. Raises
    ConfigError for switches that name no row.
    """
    rows = tuple(rows)
    config = with_recompute(config, _on(config, rows))
    checks = [
        *check_config(config, keys_of(overrides), trees),
        _verl(config.recipe.line, trees),
        *engine_checks(config),
    ]
    model, ok = model_shape_of(config), {check.name: check.ok for check in checks}
    experts = model.n_routed_experts
    train = rollout = memory = inference = None
    if ok["train layout"]:
        layout = train_layout_of(config)
        stages = range(layout.pp) if ok["layers"] else ()
        train = {
            "layout": str(layout),
            "groups": {name: layout.groups(name) for name in TRAIN_GROUPS if layout.size(name) > 1},
            "layers": [list(layout.stage_layers(stage, model.num_hidden_layers)) for stage in stages],
            "ranks": _ranks(layout, ("tp", "dp", "pp", "ep"), experts if ok["train experts"] else None),
        }
    if ok["rollout layout"]:
        layout = rollout_layout_of(config)
        groups = {name: layout.groups(name) for name in ROLLOUT_GROUPS}
        rollout = {
            "layout": str(layout),
            "instances": layout.edp,
            "dp_per_instance": layout.dp // layout.edp,
            "groups": {name: ranks for name, ranks in groups.items() if len(ranks[0]) > 1},
            "ranks": _ranks(layout, ("edp", "dp", "tp"), experts if ok.get("rollout experts") else None, True),
        }
        if config.recipe.platform == "npu" and ok.get("rollout experts", True):
            inference = serving_plan(config, model)
    patches = patch_table(config, rows)
    sections = dict.fromkeys(("step", "start", "traffic", "ports"))
    if train and rollout and all(ok.get(name, True) for name in _SIZED):
        on = [row["id"] for row in patches if row["on"]]
        memory = memory_plan(config, on)
        checks += [_memory(memory), *_host_memory(memory)]
        if ok.get("weight sync", True):
            sections |= step_sections(config, on, workload)
        if sections["step"]:
            step_s, pinned = sections["step"]["total_s"], memory["host"]["node_bytes"]
            sections["start"] = start_plan(config, step_s, pinned, workload.read_gb_s)
    return {
        "config": config_name,
        "ok": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "train": train,
        "rollout": rollout,
        "memory": memory,
        "inference": inference,
        **sections,
        "patches": patches,
        "environment": [asdict(variable) for variable in environment.derive(config, trees=trees)],
        "commands": commands(config, config_name, overrides, trees),
    }


def _verl(line: str, trees: Trees) -> Check:
    """A plan can be made over any verl; a start needs the line's own."""
    fits, said = verl_check(line, trees)
    return Check("verl", True, said if fits else f"a start is refused: {said}", note=not fits)


def _memory(plan: dict[str, Any]) -> Check:
    """The memory plan as a check of the dry run; it does not refuse a start, as it is a model with assumptions."""
    if plan["hbm_bytes"] is None:
        return Check("memory", True, "modelled, with no die to compare with on this platform")
    (followed,) = (order for order in plan["orders"] if order["order"] == plan["followed"])
    if short := exceeding(followed["phases"], plan["hbm_bytes"]):
        return Check("memory", False, f"modelled: {'; '.join(short)}")
    said, layers = f"no phase needs more than the {plan['hbm_bytes'] / 1e9:.2f} GB of a die", plan["recompute_layers"]
    if layers is not None:
        layers = layers if isinstance(layers, int) else ",".join(map(str, layers))
        left = plan["hbm_bytes"] - max(phase["peak_bytes"] for phase in followed["phases"])
        said += f", {left / 1e9:.2f} GB are left; recomputed layers of a stage: {layers}"
        if left < MARGIN_BYTES:
            said += f"; LESS THAN {MARGIN_BYTES / 1e9:g} GB for what is not counted"
            return Check("memory", True, f"modelled: {said}", note=True)
    return Check("memory", True, f"modelled: {said}")


def _host_memory(plan: dict[str, Any]) -> Iterator[Check]:
    """The same for the host memory of a node with dies; a note where nothing says how much it has."""
    need, limit = plan["host"]["node_bytes"], plan["host"]["limit_bytes"]
    largest = max(plan["host"]["bytes"], key=plan["host"]["bytes"].get, default="nothing")
    pins = f"modelled: workers pin {need / 2**30:.0f} GiB of the fullest node, most of it for {largest}"
    if limit is None and plan["hbm_bytes"] is not None:
        said = f"{pins}; NOT COMPARED with what a node has: set recipe.memory.host_gib (`free -g` on a node)"
        yield Check("host memory", True, said, note=True)
    elif limit is not None:
        todo = "" if need <= limit else "; use more nodes, over which the optimizer is sharded"
        yield Check("host memory", need <= limit, f"{pins}; it has {limit / 2**30:.0f}{todo}")


def engine_checks(config: DictConfig) -> list[Check]:
    """Line a3: what the training engine refuses of the configuration and the model, each by name."""
    if config.recipe.line != LINE:
        return []
    rows = explain(config, hf_config_of(config))
    refused = [f"{row.key} is {row.value!r}: {row.why}" for row in rows if row.how == "refused"]
    held = f"none of {len(rows)} keys is refused; config --explain shows what each becomes"
    return [Check("engine arguments", False, text) for text in refused] or [Check("engine arguments", True, held)]


def _ranks(
    layout: ParallelLayout, axes: tuple[str, ...], experts: int | None, rest_on_last: bool = False
) -> list[dict[str, Any]]:
    entries = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        entry: dict[str, Any] = {"rank": rank, **{axis: getattr(place, axis) for axis in axes}}
        if experts is not None:
            held = layout.local_experts(rank, experts, rest_on_last)
            entry["experts"] = [held.start, held.stop - 1]
        entries.append(entry)
    return entries


def patch_table(config: DictConfig, rows: Iterable[PatchSpec]) -> list[dict[str, Any]]:
    """One {id, on, reason, kind, target} a row of the catalogue for the line, platform and patches of `config`."""
    rows, switches = tuple(rows), environment.switches_of(config)
    switches.check_against({row.id: row for row in rows})
    table = []
    for row in rows:
        wanted, reason = switches.decide(row)
        table.append({"id": row.id, "on": wanted, "reason": reason, "kind": row.kind, "target": row.target})
    return table


def commands(config: DictConfig, config_name: str, overrides: Sequence[str], trees: Trees) -> list[dict[str, str]]:
    """The commands to type, in order: [{where, command}]; HEAD and NODE stand for addresses of the operator's nodes.

    `ray start` gets this checkout and the upstream trees (the same paths on every node) before the node's own
    PYTHONPATH: its workers import verl_patches, and without trees they import the image's upstream packages.
    """
    lines, nodes, dies = [], config.trainer.nnodes, config.trainer.n_gpus_per_node
    places = [str(environment.REPOSITORY), *map(str, trees.folders)]
    here = f"PYTHONPATH={shlex.quote(os.pathsep.join(places))}${{PYTHONPATH:+:$PYTHONPATH}} "
    if config.recipe.ray_address is not None:
        device = {"NPU" if config.trainer.device == "npu" else "GPU": dies}
        lines.append(("head node", here + shlex.join(ray_start("HEAD", "HEAD", True, device))))
        if nodes > 1:
            other = shlex.join(ray_start("HEAD", "NODE", False, device))
            lines.append((f"each of the other {nodes - 1} nodes", here + other))
    train = ["python", "-m", "verl_patches", "train", "--config-name", config_name, *trees.option, *overrides]
    lines.append(("head node" if lines else "this machine", here + shlex.join(train)))
    driver = shlex.join(driver_command(environment.run_dir(config) / environment.COMPOSED))
    lines.append(("started by the last one, not to be typed", driver))
    return [{"where": where, "command": command} for where, command in lines]


def peak_bytes(config: DictConfig, rows: Iterable[PatchSpec]) -> int:
    """Modelled bytes of the worst rank at the peak of a step, in the order that the run follows."""
    return followed_peaks(config, _on(config, rows))["peak_bytes"]


def host_bytes(config: DictConfig, rows: Iterable[PatchSpec]) -> int:
    """Modelled bytes of model states in the host memory of the fullest node; ConfigError where sizes do not divide.

    With dies what workers pin, without (platform cpu, npu_emulated) all states of training and rollout. Processes and
    Ray's object store come on top.
    """
    of_node = states_bytes if config.recipe.platform in NO_DEVICE else pinned_bytes
    return of_node(config, _on(config, rows))


def _on(config: DictConfig, rows: Iterable[PatchSpec]) -> list[str]:
    return [row["id"] for row in patch_table(config, rows) if row["on"]]
