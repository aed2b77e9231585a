"""The command `plan`: what a configuration would use, how long a step would take, and layouts for a number of dies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from verl_patches.catalog import ROWS
from verl_patches.cli.output import Json, print_json, report_plan, table
from verl_patches.cli.run import Overrides, Upstream, VerlPath, check_switches
from verl_patches.config.compose import compose
from verl_patches.errors import ConfigError
from verl_patches.planning.plan import patch_table
from verl_patches.planning.search import search
from verl_patches.planning.step_plan import Workload
from verl_patches.upstream.checkouts import for_platform, trees_of

CONFIG_HELP = "A file of configs/, such as grpo_deepseekv3_256die_true_weight."
SEARCH_HELP = "List the fastest legal layouts of the config's model and batch on --dies."
DIES_HELP = "With --search: dies in whole nodes of 16, 16 to 1024; default: the config's."
TOP_HELP = "With --search: how many layouts."
PROMPT_HELP = "Mean tokens of a prompt; default: the published run's."
RESPONSE_HELP = "Mean tokens of responses that end by themselves, before the cut."
SYNC_HELP = "hccl|gloo: what carries the DP ranks' syncs of a decode step."


def plan_command(
    config_name: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    overrides: Overrides = None,
    searched: Annotated[bool, typer.Option("--search", help=SEARCH_HELP)] = False,
    dies: Annotated[int | None, typer.Option(help=DIES_HELP)] = None,
    top: Annotated[int, typer.Option(min=1, max=20, help=TOP_HELP)] = 5,
    prompt_tokens: Annotated[float | None, typer.Option(help=PROMPT_HELP)] = None,
    response_tokens: Annotated[float | None, typer.Option(help=RESPONSE_HELP)] = None,
    dp_sync: Annotated[str, typer.Option(help=SYNC_HELP)] = "hccl",
    verl_path: VerlPath = None,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Checks, layouts, memory, traffic and modelled step time of a config; nothing is started. Exit code 1: refused."""
    overrides, trees = overrides or [], trees_of(upstream, verl_path)
    workload = Workload(prompt_tokens, response_tokens, dp_sync)
    if dies is not None and not searched:
        raise ConfigError(f"--dies {dies} is for --search; a plan's dies are trainer.nnodes x trainer.n_gpus_per_node")
    config = compose(config_name, overrides, verl_path=trees.verl)
    trees = for_platform(config.recipe.platform, trees)
    check_switches(config)
    if not searched:
        report_plan(config, config_name, overrides, trees, workload, as_json)
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node if dies is None else dies
    on = [row["id"] for row in patch_table(config, ROWS) if row["on"]]
    found = {"config": config_name, "dies": dies, "modelled": True, "layouts": search(config, on, dies, workload, top)}
    if as_json:
        print_json(found)
    else:
        _show(found, overrides)


def _show(found: dict[str, Any], overrides: list[str]) -> None:
    layouts, rows = found["layouts"], []
    for number, row in enumerate(layouts, 1):
        phases = {phase["phase"]: phase["seconds"] for phase in row["phases"]}
        seconds = [f"{phases[name]:.1f}" for name in ("rollout", "ref", "update")]
        peaks = [f"{row[key] / 1e9:.1f}" for key in ("peak_bytes", "update_bytes")]
        cells = (f"{row['total_s']:.1f}", f"{row['tokens_per_s_per_die']:.1f}", *seconds, row["train"], row["rollout"])
        rows.append((str(number), *cells, str(row["micro_batch"]), *peaks))
    columns = ("", "step s", "tokens/s/die", "rollout", "ref", "update", "train", "rollout layout", "micro batch")
    title = f"fastest layouts of {found['config']} on {found['dies']} dies (modelled)"
    table(title, (*columns, "peak GB", "in update GB"), rows)
    for number, row in enumerate(layouts, 1):
        words = " ".join(f"'{word}'" if "[" in word else word for word in [*overrides, *row["overrides"]])
        typer.echo(f"{number}: python -m verl_patches plan {found['config']} {words}")
