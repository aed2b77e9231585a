"""Define the command `doctor`, which checks whether this node, and all nodes of a running Ray, are ready for a run."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from verl_patches.catalog import platform_rows
from verl_patches.cli.output import Json, print_json, print_report
from verl_patches.cli.run import Upstream
from verl_patches.errors import ConfigError
from verl_patches.launch.doctor import doctor
from verl_patches.launch.doctor.node_checks import Node
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.patching.switches import PATCHES_VAR, parse_switches
from verl_patches.plan.memory_plan import with_planned_keys
from verl_patches.platform import NO_DEVICE
from verl_patches.run.compose import compose
from verl_patches.upstream.checkouts import find_trees

PRODUCTION_CONFIG = "deepseekv3_256die_true_weight"
WORDS_HELP = f"A file of configs/ (default: {PRODUCTION_CONFIG}, or the smoke run's with platform=cpu), then overrides."
THIS_NODE_HELP = "Check only this node, even if a Ray cluster of several nodes runs."
HEAD_HELP = "HOST:PORT of Ray's head; set by doctor itself when it checks another node."


def doctor_command(
    words: Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [key=value ...]", help=WORDS_HELP)] = None,
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
    words = words or []
    if words and "=" not in words[0]:
        name, *overrides = words
    else:
        name, overrides = _default_config(), words
    run = with_planned_keys(compose(name, overrides, platform_rows, find_trees(upstream)))
    node = Node(run, head=head)
    if this_node or (node.nodes == 1 and run.recipe.ray_address is None):
        report, nodes = doctor.check_this_node(node)
    elif run.recipe.ray_address is None:
        fault = f"recipe.ray_address is null and trainer.nnodes is {node.nodes}; expected a running Ray's address"
        raise ConfigError(f"{fault}: set recipe.ray_address=auto, or give --this-node")
    else:
        options = [] if upstream is None else ["--upstream", str(upstream.absolute())]
        report, nodes = doctor.check_all_nodes(node, [name, *overrides, *options])
    if as_json:
        print_json({**report.as_dict(), "nodes": nodes})
    else:
        print_report(report)
    raise typer.Exit(report.exit_code)


def _default_config() -> str:
    """Return the config for a command that names none: of VERL_PATCHES's platform, else production's."""
    given = os.environ.get(PATCHES_VAR)
    return CONFIG_NAME if given and parse_switches(given).platform in NO_DEVICE else PRODUCTION_CONFIG
