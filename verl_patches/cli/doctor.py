"""Define `doctor`, which checks whether nodes are ready for a run, and `bringup`, which proves them rung by rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from verl_patches.catalog import platform_rows
from verl_patches.cli.output import Json, exit_with_report, print_json, print_report, print_text
from verl_patches.cli.run import CONFIG_HELP, Overrides, Upstream, compose_run, start_run
from verl_patches.errors import ConfigError
from verl_patches.launch import smoke
from verl_patches.launch.bringup.bringup import PAGE, RUNGS, Bringup
from verl_patches.launch.doctor import doctor
from verl_patches.launch.doctor.node_checks import Node
from verl_patches.patching.spec import LEVELS
from verl_patches.plan.memory_plan import with_planned_keys
from verl_patches.run.compose import compose, output_root
from verl_patches.run.run_folder import lock_folder
from verl_patches.upstream.checkouts import find_trees

FROM_HELP = "First rung; default: the one that failed in the last call, else the first."
TO_HELP = "Last rung."
LEVEL_HELP = "Train at this level alone in rung levels; can be repeated."
THIS_NODE_HELP = "Check only this node, even if a Ray cluster of several nodes runs."
HEAD_HELP = "HOST:PORT of Ray's head; set by doctor itself when it checks another node."


def doctor_command(
    config_name: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    overrides: Overrides = None,
    this_node: Annotated[bool, typer.Option("--this-node", help=THIS_NODE_HELP)] = False,
    upstream: Upstream = None,
    head: Annotated[str | None, typer.Option(help=HEAD_HELP, hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Check this node, and all nodes of the run's Ray, before a run; nothing is started or changed.

    Every call has a time limit. If no Ray answers at recipe.ray_address, that is a problem, and only this node is
    checked.

    Exit code 0: no problem. 1: a problem, or on platform npu a check that could not be made. 2: a wrong argument.
    """
    words = [config_name, *(overrides or [])]
    run = with_planned_keys(compose(config_name, words[1:], platform_rows, find_trees(upstream)))
    node = Node(run, head=head)
    if this_node or (node.nodes == 1 and run.recipe.ray_address is None):
        report = doctor.check_this_node(node)
    elif run.recipe.ray_address is None:
        fault = f"recipe.ray_address is null and trainer.nnodes is {node.nodes}; expected a running Ray's address"
        raise ConfigError(f"{fault}: set recipe.ray_address=auto, or give --this-node")
    else:
        options = [] if upstream is None else ["--upstream", str(upstream.absolute())]
        report = doctor.check_all_nodes(node, [*words, *options])
    exit_with_report(report, as_json)


def bringup_command(
    config_name: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    overrides: Overrides = None,
    first: Annotated[str | None, typer.Option("--from", metavar="RUNG", help=FROM_HELP)] = None,
    last: Annotated[str, typer.Option("--to", metavar="RUNG", help=TO_HELP)] = [*RUNGS][-1],
    levels: Annotated[list[str] | None, typer.Option("--level", metavar="LEVEL", help=LEVEL_HELP)] = None,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Prove a machine rung by rung: machine, operators, groups, levels, resume, measured.

    Each rung says what it proves. The report is <output_root>/<run>_bringup/bringup.md, with bringup.json beside it.
    """
    words, trees = overrides or [], find_trees(upstream)
    chosen = [("--from", first or last, [*RUNGS]), ("--to", last, [*RUNGS])]
    for option, name, known in [*chosen, *(("--level", level, [*LEVELS]) for level in levels or ())]:
        if name not in known:
            raise ConfigError(f"{option} {name}: expected one of {', '.join(known)}")
    if first and [*RUNGS].index(first) > [*RUNGS].index(last):
        raise ConfigError(f"--from {first} --to {last}: expected rungs in the order {', '.join(RUNGS)}")
    if given := [word for word in words if word.startswith("level=")]:
        raise ConfigError(f"{given[0]}: rung levels trains at all levels; give --level to choose some")
    composed = _smoke_words(words, as_json) if config_name == smoke.CONFIG_NAME else words
    bringup = Bringup(
        words=[config_name, *words],
        option=[] if upstream is None else ["--upstream", str(upstream.absolute())],
        compose=lambda more: compose_run(config_name, [*composed, *more], trees),
        begin=lambda run, often: start_run(run, as_json, often=often)[0],
        catalogue=platform_rows,
        say=lambda text: None if as_json else print_text(text),
        levels=levels or (),
    )
    if levels and not bringup.run.as_npu:
        raise ConfigError(f"--level {levels[0]}: levels are settings of NPUs, found platform {bringup.run.platform}")
    with lock_folder(bringup.folder, "recipe.run"):
        report = bringup.climb(first, last)
    if as_json:
        print_json(bringup.as_dict())
    else:
        print_report(report)
        print_text(f"report: {bringup.folder / PAGE}", whole=True)
    raise typer.Exit(report.exit_code)


def _smoke_words(words: Sequence[str], silent: bool) -> list[str]:
    """Return the overrides of a smoke run with these ones; its tiny model and data are made."""
    options = smoke.SmokeOptions(words)
    line, platform = (
        options.chosen_value(key, value) for key, value in (("recipe.line", "pypi"), ("recipe.platform", "cpu"))
    )
    options = replace(options, line=line, emulate_npu=platform == "npu_emulated")
    inputs = smoke.smoke_inputs(options, output_root() / "cache")
    inputs.make(lambda text: None if silent else print_text(text))
    return smoke.smoke_overrides(options, inputs.overrides)
