"""Plan a run as plain data: groups of ranks, checks, memory, patch rows, environment, commands.

It starts and writes nothing, and does not import torch or verl.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import Check, either, our_command
from verl_patches.patching.spec import PatchSpec
from verl_patches.plan.memory_plan import (
    MARGIN_BYTES,
    MEMORY_MONITOR_SHARE,
    kv_cache_plan,
    memory_plan,
    memory_shortages,
    run_memory,
)
from verl_patches.plan.step_plan import Workload, mean_tokens, step_sections
from verl_patches.platform.npu.machine import HARDWARE
from verl_patches.run import environment
from verl_patches.run.ray_nodes import ray_start
from verl_patches.run.resolve import ROLLOUT_LAYOUT, TRAIN_LAYOUT, LayoutError
from verl_patches.spec import RunSpec, Trees
from verl_patches.values import leaves, size_text
from verl_patches.weights.writer import SYNC_BYTES

DRIVER_MODULE = "verl_patches.main"
TRAIN_GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
ROLLOUT_GROUPS = ("tp", "instance", "instance-dp", "ep")
_SIZE_CHECKS = ("layers", "train experts", "rollout experts")  # checks that the memory plan needs
_LAYOUT_CHECKS = {TRAIN_LAYOUT, ROLLOUT_LAYOUT, "memory", *_SIZE_CHECKS}  # checks that another layout may pass


def driver_command(folder: Path) -> list[str]:
    """Return the driver's command line, which the launcher starts with the environment of the run in `folder`."""
    return [sys.executable, "-m", DRIVER_MODULE, str(folder)]


def build_plan(
    run: RunSpec,
    checks: Iterable[Check],
    config_name: str,
    overrides: Sequence[str],
    catalogue: Iterable[PatchSpec],
    workload: Workload = Workload(),  # noqa: B008 frozen
    other: RunSpec | None = None,
) -> dict[str, Any]:
    """Return everything that a run would use, as JSON-ready data; `ok` is false if any check failed.

    checks: results of the table of rules for this run. other: the same run at another level. Keys: config, ok, checks,
    train, rollout, those of `plan_figures`, level (`_level_difference`), patches, environment, commands, verdict, next.
    All groups are listed.
    """
    checks, figures = plan_figures(run, checks, workload)
    ok = {check.name: check.ok for check in checks}
    given = [config_name, *run.trees.option, *workload.option, *overrides]
    todo = run_commands(run, config_name, overrides)
    return {
        "config": config_name,
        "ok": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "train": _train_section(run, ok),
        "rollout": _rollout_section(run),
        **figures,
        "level": _level_difference(run, other, workload, figures["step"]) if other else None,
        "patches": patch_table(run, catalogue),
        "environment": [asdict(variable) for variable in environment.environment_variables(run)],
        "commands": todo,
        **_verdict(checks, figures["memory"], todo, _search_command(run.verl, given)),
    }


def plan_without_layout(
    error: LayoutError, config_name: str, trees: Trees, overrides: Sequence[str], workload: Workload
) -> dict[str, Any]:
    """Return the plan of a configuration whose ranks cannot be split as it says: the reason, and how to go on."""
    nothing = ("train", "rollout", "memory", "step", "level", "disk", "traffic", "ports")
    lists: dict[str, list] = {"patches": [], "environment": [], "commands": []}
    checks, given = [Check(error.side, False, error.reason)], [config_name, *trees.option, *workload.option, *overrides]
    plan = {"config": config_name, "ok": False, "checks": [asdict(check) for check in checks]}
    verdict = _verdict(checks, None, [], _search_command(error.config, given))
    return {**plan, **dict.fromkeys(nothing), **lists, **verdict}


def plan_figures(run: RunSpec, checks: Iterable[Check], workload: Workload) -> tuple[list[Check], dict[str, Any]]:
    """Return the checks of a plan, with those of its memory, and {memory, step, disk, traffic, ports}.

    They come from `memory_plan` and `step_sections`, and are all None where layers or experts cannot be split.
    """
    checks = list(checks)
    ok = {check.name: check.ok for check in checks}
    figures: dict[str, Any] = dict.fromkeys(("memory", "step", "disk", "traffic", "ports"))
    if all(ok.get(name, True) for name in _SIZE_CHECKS):
        memory = run_memory(run)
        figures["memory"] = planned = memory_plan(run, memory)
        planned["kv_cache"] = kv_cache_plan(run, memory, mean_tokens(run, workload))
        checks += [_memory_check(planned), *_kv_cache_checks(planned["kv_cache"]), *_host_memory_checks(planned)]
        if ok.get("weight sync", True):
            figures |= step_sections(run, memory, workload)
            checks += _disk_checks(run, figures["disk"], figures["step"])
    return checks, figures


def _level_difference(
    run: RunSpec, other: RunSpec, workload: Workload, step: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return {other, keys, rows, total_s, range_s, saves_s}: what differs at another level, and its modelled seconds.

    saves_s: seconds that this run's step saves over the other's. All seconds are None where this run has none.
    """
    one, two = (dict(leaves(OmegaConf.to_container(each.verl))) for each in (run, other))
    keys = [key for key in one if key != "recipe.level" and one[key] != two.get(key)]
    found: dict[str, Any] = {"other": other.recipe.level, "keys": keys, "rows": sorted(run.rows ^ other.rows)}
    total_s = range_s = saves_s = None
    if step and (there := step_sections(other, run_memory(other), workload)["step"]):
        total_s, range_s = there["total_s"], there["total_range_s"]
        saves_s = round(total_s - step["total_s"], 2)
    return {**found, "total_s": total_s, "range_s": range_s, "saves_s": saves_s}


def _verdict(
    checks: Sequence[Check], memory: dict[str, Any] | None, todo: list[dict[str, str]], search: str | None
) -> dict[str, Any]:
    """Return {verdict, next: [{what, command}]}: a plan's result, and the commands to go on with.

    todo: the commands of a run. search: the command that searches layouts, None if there is none.
    """
    if failed := [check.name for check in checks if not check.ok]:
        text = f"does not fit: {len(failed)} of {len(checks)} checks failed: {', '.join(dict.fromkeys(failed))}"
        if search is None or _LAYOUT_CHECKS.isdisjoint(failed):
            names = "it names" if len(failed) == 1 else "they name"
            return {"verdict": f"{text}; next: change the settings that {names}", "next": []}
        what = "a search lists layouts that fit, or says why none does"
        return {"verdict": text, "next": [{"what": what, "command": search}]}
    text = f"fits: all {len(checks)} checks hold"
    for check in checks:
        if memory and check.note and check.name == "host memory":
            text += host_memory_note([memory["host"]])
    typed = [each for each in todo if "not to be typed" not in each["where"]]
    if refused := [check.name for check in checks if check.detail.startswith("a start is refused")]:
        names = ", ".join(refused)
        return {"verdict": f"{text}; a start is refused here; next: do what the note on {names} says", "next": []}
    return {"verdict": text, "next": [{"what": each["where"], "command": each["command"]} for each in typed]}


def host_memory_note(plans: Iterable[Mapping[str, Any]]) -> str:
    """Return the end of a verdict about the host memory of nodes; empty where it was compared.

    plans: {node_bytes, limit_bytes} of each plan.
    """
    needs = [f"{plan['node_bytes'] / 2**30:.0f}" for plan in plans if plan["limit_bytes"] is None]
    text = f"HOST MEMORY NOT COMPARED: a node needs {', '.join(needs)} GiB (recipe.memory.host_gib)"
    return f"; {text}" if needs else ""


def _search_command(config: DictConfig, given: Sequence[str]) -> str | None:
    """Return the command that searches layouts on whole nodes; None where `search.search` would refuse it.

    given: words of the command line that gave the plan.
    """
    recipe, trainer = config.recipe, config.trainer
    if recipe.platform != "npu" or recipe.train.expert_split != "tp_extend_ep":
        return None
    node = HARDWARE[recipe.hardware].usable_dies(trainer.n_gpus_per_node)
    dies = math.ceil(trainer.nnodes * trainer.n_gpus_per_node / node) * node
    return our_command("plan", *given, "--search", "--dies", str(dies))


def _train_section(run: RunSpec, ok: Mapping[str, bool]) -> dict[str, Any]:
    """Return groups and layers of the training; layers are missing where they cannot be split."""
    layout = run.train
    stages = range(layout.pp) if ok["layers"] else ()
    return {
        "layout": str(layout),
        "groups": {name: layout.groups(name) for name in TRAIN_GROUPS if layout.size(name) > 1},
        "layers": [list(layout.stage_layers(stage, run.model.num_hidden_layers)) for stage in stages],
    }


def _rollout_section(run: RunSpec) -> dict[str, Any]:
    """Return groups of vLLM's instances."""
    layout = run.rollout
    groups = {name: layout.groups(name) for name in ROLLOUT_GROUPS}
    return {
        "layout": str(layout),
        "instances": layout.edp,
        "dp_per_instance": layout.dp // layout.edp,
        "groups": {name: ranks for name, ranks in groups.items() if len(ranks[0]) > 1},
    }


def _memory_check(plan: dict[str, Any]) -> Check:
    """Return the memory plan as a check of the dry run; it refuses no start, as it is a model with assumptions."""
    if plan["hbm_bytes"] is None:
        return Check("memory", True, "modelled; not compared, as this platform has no dies")
    if short := memory_shortages(plan["phases"], plan["hbm_bytes"]):
        return Check("memory", False, f"modelled: {'; '.join(short)}")
    fullest, layers = max(plan["phases"], key=itemgetter("peak_bytes")), plan["recompute_layers"]
    text = f"the fullest die needs {fullest['peak_bytes'] / 1e9:.2f} GB of {plan['hbm_bytes'] / 1e9:.2f} (rank "
    text += f"{fullest['rank']}, {fullest['phase']})"
    if layers is not None:
        layers = layers if isinstance(layers, int) else ",".join(map(str, layers))
        left = plan["hbm_bytes"] - fullest["peak_bytes"]
        text += f", {left / 1e9:.2f} GB are left; recomputed layers of a stage: up to {layers}"
        if left < MARGIN_BYTES:
            text += f"; LESS THAN {MARGIN_BYTES / 1e9:g} GB for memory that the model does not count"
            return Check("memory", True, f"modelled: {text}", note=True)
    return Check("memory", True, f"modelled: {text}")


def _kv_cache_checks(cache: dict[str, Any] | None) -> Iterator[Check]:
    """Yield the check of the tokens that a die's KV cache holds; a note where responses are likely to be preempted."""
    if cache is None:
        return
    sequences, safe, preemption = cache["sequences"], cache["safe_sequences"], cache["preemption"]
    text = f"modelled: a die holds {cache['held_tokens']:,} tokens; {sequences} sequences (max_num_seqs) need at most "
    text += f"{cache['needed_tokens']:,}, {cache['expected_tokens']:,} at their mean length: preemption {preemption}"
    if not safe:
        text += "; vLLM does not start, as not one of full length fits: raise rollout.gpu_memory_utilization"
    elif preemption != "impossible":
        text += f", and a preempted response is computed again; max_num_seqs={safe} excludes it"
    yield Check("KV cache", safe > 0, text, note=preemption == "likely")


def _host_memory_checks(plan: dict[str, Any]) -> Iterator[Check]:
    """Yield the check of host memory of a node with dies; a note where its size is unknown."""
    host, largest = plan["host"], max(plan["host"]["bytes"], key=plan["host"]["bytes"].get, default="nothing")
    limit, need = host["limit_bytes"], host["node_bytes"]
    text = f"modelled: the fullest node needs {need / 2**30:.0f} GiB: {host['pinned_bytes'] / 2**30:.0f} that workers "
    text += f"pin, most of it for {largest}, {host['workers_bytes'] / 2**30:.0f} for their processes and at most "
    text += f"{host['object_store_bytes'] / 2**30:.0f} for Ray's object store"
    if limit is None and plan["hbm_bytes"] is not None:
        text += "; NOT COMPARED with what a node has: set recipe.memory.host_gib (`free -g` on a node)"
        yield Check("host memory", True, text, note=True)
    elif limit is not None:
        room = int(MEMORY_MONITOR_SHARE * limit)
        text += f"; the node has {limit / 2**30:.0f}, of which Ray's memory monitor leaves {room / 2**30:.0f}"
        store = room - (need - host["object_store_bytes"])  # what it leaves the store
        if store < 0:
            text += "; use more nodes, over which the optimizer is sharded"
        elif need > room:
            text += f"; start Ray with --object-store-memory={store}, or a full store ends the run"
        yield Check("host memory", store >= 0, text, note=store >= 0 and need > room)


def _disk_checks(run: RunSpec, disk: dict[str, Any], step: dict[str, Any] | None) -> Iterator[Check]:
    """Yield the check that no restart would end again in the same read or save; none where the run does neither."""
    seconds = {part["part"]: part["seconds"] for part in disk["parts"]}
    if not seconds:
        return
    timeouts, faults = run.recipe.timeouts, []
    read_s = max((each for part, each in seconds.items() if part != "save"), default=0.0)  # a save says its progress
    text = f"modelled, at {disk['gb_s']:g} GB/s of all nodes (--disk-gb-s): "
    text += ", ".join(f"{part} {each:.0f} s" for part, each in seconds.items())
    flush_s = run.world_size * SYNC_BYTES / disk["gb_s"] / 1e9
    if flush_s > timeouts.load_s:
        faults.append(f"{size_text(SYNC_BYTES)} of each rank take {flush_s:.0f} s, above recipe.timeouts.load_s")
    if run.recipe.watch.action == "off" and read_s > (timeouts.quiet_s or math.inf):
        faults.append("with recipe.watch.action=off a start has no output for longer than recipe.timeouts.quiet_s")
    if step:
        before_update = sum(each["seconds"] for each in step["phases"] if not each["phase"].startswith("update"))
        if (waits := seconds.get("save", 0.0) - before_update) > 0:
            text += f"; the update after a save waits for {waits:.0f} s of it"
    fault = (
        f"{text}; {'; '.join(faults)}: each restart would end there again; raise what is named, or use a faster disk"
    )
    yield either("disk rate", not faults, text, fault)


def patch_table(run: RunSpec, catalogue: Iterable[PatchSpec]) -> list[dict[str, Any]]:
    """Return one {id, on, reason, kind, target} for each patch (row) of the catalogue."""
    table, switches = [], run.process_switches
    for row in catalogue:
        wanted, reason = switches.decide(row)
        table.append({"id": row.id, "on": wanted, "reason": reason, "kind": row.kind, "target": row.target})
    return table


def run_commands(run: RunSpec, config_name: str, overrides: Sequence[str]) -> list[dict[str, str]]:
    """Return the commands to type, in order: [{where, command}]; HEAD and NODE stand for addresses of the user's nodes.

    `ray start` gets this checkout and the upstream trees (the same paths on every node) before the node's own
    PYTHONPATH, as its workers import verl_patches; without trees they import the image's upstream packages.
    """
    lines, nodes, dies = [], run.verl.trainer.nnodes, run.verl.trainer.n_gpus_per_node
    places = [str(environment.REPOSITORY), *map(str, run.trees.folders)]
    here = f"PYTHONPATH={shlex.quote(os.pathsep.join(places))}${{PYTHONPATH:+:$PYTHONPATH}} "
    if run.recipe.ray_address is not None:
        device = {"NPU" if run.verl.trainer.device == "npu" else "GPU": dies}
        lines.append(("head node", here + shlex.join(ray_start("HEAD", "HEAD", True, device))))
        if nodes > 1:
            other = shlex.join(ray_start("HEAD", "NODE", False, device))
            lines.append((f"each of the other {nodes - 1} nodes", here + other))
    train = our_command("train", "--config-name", config_name, *run.trees.option, *overrides)
    lines.append(("head node" if lines else "this machine", here + train))
    driver = shlex.join(driver_command(run.folder))
    lines.append(("started by the last one, not to be typed", driver))
    return [{"where": where, "command": command} for where, command in lines]
