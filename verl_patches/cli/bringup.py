"""Define the command `bringup`, which proves a machine rung by rung, from its software to a resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from verl_patches.catalog import platform_rows
from verl_patches.cli.output import Json, print_json, print_report, print_text
from verl_patches.cli.run import CONFIG_HELP, Overrides, Upstream, compose_run, start_run
from verl_patches.errors import ConfigError
from verl_patches.launch import smoke
from verl_patches.launch.bringup.bringup import PAGE, RUNGS, Bringup
from verl_patches.patching.spec import LEVELS
from verl_patches.run.compose import output_root
from verl_patches.run.run_folder import lock_folder
from verl_patches.upstream.checkouts import find_trees

FROM_HELP = "First rung; default: the one that failed in the last call, else the first."
TO_HELP = "Last rung."
LEVEL_HELP = "Train at this level alone in rung levels; can be repeated."


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
    for rung in (first, last):
        if rung not in (*RUNGS, None):
            raise ConfigError(f"{rung}: expected a rung, one of {', '.join(RUNGS)}")
    for level in levels or ():
        if level not in LEVELS:
            raise ConfigError(f"--level {level}: expected one of {', '.join(LEVELS)}")
    if given := [word for word in words if word.startswith("level=")]:
        raise ConfigError(f"{given[0]}: rung levels trains at all levels; give --level to choose some")
    composed = _smoke_words(words, as_json) if config_name == smoke.CONFIG_NAME else words
    bringup = Bringup(
        words=[config_name, *composed],
        option=[] if upstream is None else ["--upstream", str(upstream.absolute())],
        compose=lambda more: compose_run(config_name, [*composed, *more], trees),
        begin=lambda run, often: start_run(run, as_json, often=often)[0],
        catalogue=platform_rows,
        say=lambda text: None if as_json else print_text(text),
        chosen_levels=levels or (),
    )
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
