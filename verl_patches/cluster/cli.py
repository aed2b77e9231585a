"""The commands that run something: `smoke` and `train`, as functions that the command line adds to itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import DictConfig
from rich.console import Console

from verl_patches.cluster import facts, launch, smoke
from verl_patches.cluster.checkouts import LINE, require_trees, require_verl, trees_of
from verl_patches.cluster.checks import check_config, require
from verl_patches.cluster.compose import CONFIGS_DIR, compose
from verl_patches.cluster.modified import refuse_modified
from verl_patches.cluster.plan import build_plan, show
from verl_patches.cluster.show import Json
from verl_patches.cluster.support import refused_keys
from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.arguments import arguments_of
from verl_patches.patching.spec import PatchSpec
from verl_patches.platform import require as require_platform
from verl_patches.training.engine_arguments import explain

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Any further Hydra overrides.")]

Upstream = Annotated[
    Path | None, typer.Option(help="Folder with the clones of scripts/fetch_upstream.sh, for line a3.")
]

_WIDTH_IN_FILES = 160


def register(app: typer.Typer, rows: Callable[[], Sequence[PatchSpec]]) -> None:
    """Add `smoke` and `train` to `app`; `rows` returns the catalogue when a plan needs it."""

    @app.command("smoke")
    def smoke_command(
        overrides: Overrides = None,
        train_layout: Annotated[
            str, typer.Option(help="|".join(smoke.TRAIN_LAYOUTS) + ", the last two on 4 workers.")
        ] = "ep2",
        rollout_tp: Annotated[int, typer.Option(help="vLLM tensor parallel size; 2 turns expert parallel on.")] = 1,
        rollout_dp: Annotated[int, typer.Option(help="vLLM data parallel size, experts split across it.")] = 1,
        steps: Annotated[
            int | None, typer.Option(help="GRPO steps (default: 3, with --learn what learning takes).")
        ] = None,
        dtype: Annotated[str, typer.Option(help="fp32|bf16")] = "fp32",
        replay_rollout: Annotated[
            Path | None, typer.Option(help="Train on the responses that another run recorded.")
        ] = None,
        learn: Annotated[bool, typer.Option("--learn", help="A task that the tiny model can learn.")] = False,
        run: Annotated[str | None, typer.Option(help="Name; the run writes to outputs/NAME.")] = None,
        seed: Annotated[int, typer.Option(help="Of model, data order and sampling.")] = 0,
        line: Annotated[str, typer.Option(help="|".join(smoke.LAYOUTS) + ": whose sources run.")] = "pypi",
        upstream: Upstream = None,
        as_json: Json = False,
    ) -> None:
        """Real GRPO, small: verl, Megatron, vLLM and Ray on this machine's CPU with a tiny DeepSeek-V3."""
        options = smoke.SmokeOptions(
            train_layout, rollout_tp, rollout_dp, steps, dtype, replay_rollout, learn, run, seed, line, upstream
        )
        run_smoke(options, overrides or [], as_json)

    @app.command("train")
    def train_command(
        overrides: Overrides = None,
        config_name: Annotated[
            str, typer.Option(help="A file of configs/, such as grpo_deepseekv3_256die_true_weight.")
        ] = ...,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Check and print everything; start and write nothing.")
        ] = False,
        verl_path: Annotated[Path | None, typer.Option(help="A verl checkout; default: the installed one.")] = None,
        upstream: Upstream = None,
        as_json: Json = False,
    ) -> None:
        """Run a config of this repository for real, or show what it would do."""
        run_train(config_name, overrides or [], rows(), dry_run, verl_path, as_json, upstream)


def run_smoke(options: smoke.SmokeOptions, overrides: Sequence[str], as_json: bool) -> None:
    """The smoke command: prepare, launch, report; leaves by typer.Exit with the run's exit code."""
    given = smoke.overrides_of(options)
    trees = trees_of(options.upstream)
    chosen = compose(options.config_name, [*given, *overrides], verl_path=trees.verl)
    require_trees(chosen, trees)
    require(check_config(chosen, CONFIGS_DIR))  # before anything is made
    refuse_without_effect(chosen)
    require_verl(chosen.recipe.line, trees)
    dirty = refuse_modified(chosen, trees)
    with _Progress(as_json) as progress:
        made = smoke.prepare(options, Path("outputs/cache").absolute(), progress.now)
        final = [*given, *made, *overrides]
        config = compose(options.config_name, final, verl_path=trees.verl)
        outcome = launch.run(config, options.config_name, final, progress.line, trees, dirty=dirty)
    _report(outcome, as_json)


def run_train(
    config_name: str,
    overrides: Sequence[str],
    rows: Sequence[PatchSpec],
    dry_run: bool,
    verl_path: Path | None,
    as_json: bool,
    upstream: Path | None = None,
) -> None:
    """The train command. --dry-run: 0 the plan holds, 1 a check failed, 2 wrong use. Else the run's exit code."""
    trees = trees_of(upstream, verl_path)
    config = compose(config_name, overrides, verl_path=trees.verl)
    require_trees(config, trees)
    if dry_run:
        plan = build_plan(config, config_name, overrides, rows, trees=trees)
        if as_json:
            typer.echo(json.dumps(plan, indent=1))
        else:
            console = Console()
            show(plan, config, console if console.is_terminal else Console(width=_WIDTH_IN_FILES))
        for check in plan["checks"]:
            if not check["ok"]:
                typer.echo(f"verl_patches: {check['name']}: {check['detail']}", err=True)
        raise typer.Exit(0 if plan["ok"] else 1)
    try:
        require(check_config(config, CONFIGS_DIR))
    except ConfigError as error:
        typer.echo(f"verl_patches: {error}", err=True)
        raise typer.Exit(1) from None
    refuse_without_effect(config)
    require_platform(config.recipe.platform)
    require_verl(config.recipe.line, trees)
    dirty = refuse_modified(config, trees)
    if config.recipe.ray_address is not None:
        facts.check_nodes(config, facts.ask_ray(config.recipe.ray_address))
    elif config.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {config.trainer.nnodes}, but recipe.ray_address is null, which starts a Ray on this "
            "machine only; start Ray on the nodes (--dry-run prints the commands) and set recipe.ray_address=auto"
        )
    with _Progress(as_json) as progress:
        outcome = launch.run(config, config_name, overrides, progress.line, trees, dirty=dirty)
    _report(outcome, as_json)


def refuse_without_effect(config: DictConfig) -> None:
    """ConfigError for keys that the line could not act on: another run than the one asked for would start."""
    line = config.recipe.line
    given = [entry.key for entry, _ in refused_keys(config) if entry.planned]
    if given:
        raise ConfigError(
            f"line {line} cannot act on {', '.join(given)} yet, so this run is not started; --dry-run plans it. "
            "It can start once the catalogue has rows for them"
        )
    if line == LINE:
        arguments_of(explain(config))  # every key becomes an argument of MindSpeed's, or is refused by name


class _Progress:
    """Shows the driver's progress: "| " lines stay, "~ " lines say what runs now (on a terminal only)."""

    def __init__(self, silent: bool):
        self._console = Console(quiet=silent)
        self._status = self._console.status("starting") if self._console.is_terminal and not silent else None

    def __enter__(self) -> _Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def line(self, line: str) -> None:
        if line.startswith("| "):
            self._console.print(line[2:], highlight=False, markup=False, soft_wrap=True)
        elif line.startswith("~ ") and self._status:
            self._status.update(line[2:])

    def now(self, text: str) -> None:
        self.line(f"| {text}")


def _report(outcome: launch.Outcome, as_json: bool) -> None:
    if as_json:
        typer.echo((outcome.folder / "summary.json").read_text())
    elif outcome.code == 0:
        peak = outcome.peak_pss_bytes.get("total", 0) / 2**30
        typer.echo(
            f"ok in {outcome.wall_s:.0f} s, peak memory {peak:.1f} GiB (PSS of all processes); "
            f"results in {outcome.folder}"
        )
    if outcome.code:
        typer.echo(
            f"verl_patches: the run failed after {outcome.wall_s:.0f} s: {outcome.reason}\n"
            f"  log: {outcome.folder / 'driver.log'}"
            + (f"\n  Ray's logs: {outcome.folder / 'ray_logs'}" if (outcome.folder / "ray_logs").is_dir() else ""),
            err=True,
        )
    raise typer.Exit(outcome.code if outcome.code > 128 else min(outcome.code, 1))  # > 128: ended by a signal
