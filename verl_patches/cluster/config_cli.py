"""The command `config`: a composed configuration, or what it becomes for the training engine of line a3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import DictConfig, OmegaConf

from verl_patches.cluster.checkouts import LINE, trees_of, verl_check
from verl_patches.cluster.checks import hf_config_of
from verl_patches.cluster.cli import Overrides, Upstream
from verl_patches.cluster.compose import CONFIGS_DIR, compose
from verl_patches.cluster.show import Json, table
from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.arguments import Setting
from verl_patches.patching.prelude_line import PLACES
from verl_patches.training.engine_arguments import explain as explain_engine


def register(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""

    @app.command("config")
    def config_command(
        overrides: Overrides = None,
        config_name: Annotated[
            str, typer.Option(help="A file of configs/, such as grpo_deepseekv3_256die_true_weight.")
        ] = ...,
        explain: Annotated[
            bool, typer.Option("--explain", help="Print what each key becomes for MindSpeed (line a3).")
        ] = False,
        verl_path: Annotated[Path | None, typer.Option(help="A verl checkout; default: the installed one.")] = None,
        upstream: Upstream = None,
        as_json: Json = False,
    ) -> None:
        """Print a config as it is composed, in YAML; with --explain the training engine's arguments, key by key."""
        trees = trees_of(upstream, verl_path)
        config = compose(config_name, overrides or [], verl_path=trees.verl)
        line = config.recipe.line
        if explain and line != LINE:
            raise ConfigError(f"--explain is about the engine of line {LINE}, but recipe.line is {line}: "
                              f"add recipe.line={LINE}, or leave --explain away")
        fits, said = verl_check(line, trees)
        if not fits:
            typer.echo(f"verl_patches: note: defaults shown here are another verl's than a run's: {said}",
                       err=True)
        if explain:
            _explain(config, config_name, as_json)
        elif as_json:
            typer.echo(json.dumps(OmegaConf.to_container(config), indent=1))
        else:
            typer.echo(OmegaConf.to_yaml(config), nl=False)


def _explain(config: DictConfig, config_name: str, as_json: bool) -> None:
    """Leaves with 1 where a key is refused."""
    rows = explain_engine(OmegaConf.to_container(config), hf_config_of(config, CONFIGS_DIR))
    refused = [row for row in rows if row.how == "refused"]
    if as_json:
        typer.echo(json.dumps({"config": config_name, "line": config.recipe.line, "settings": [
            row._asdict() for row in rows], "refused": [row.key for row in refused]}, indent=1))
    else:
        cells = [(row.key, _text(row), _becomes(row), row.why) for row in rows]
        table(f"{config_name}: keys below actor_rollout_ref, and the model's (HF), for Megatron and MindSpeed",
              ("key", "value", "becomes", "why"), cells,
              [number for number, row in enumerate(rows) if row.how == "refused"])
        typer.echo(f"{len(rows)} rows, {len(refused)} refused. {PLACES}.")
    for row in refused:
        typer.echo(f"verl_patches: {row.key} is {_text(row)}: {row.why}", err=True)
    raise typer.Exit(1 if refused else 0)


def _becomes(row: Setting) -> str:
    return " ".join(row.arguments) or ("no argument" if row.how == "mapped" else row.how)


def _text(row: Setting) -> str:
    return "" if row.how == "fixed" else "null" if row.value is None else str(row.value)
