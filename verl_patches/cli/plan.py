"""The command `plan`: what a configuration would use, how long a step would take, and layouts for a number of dies."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from verl_patches.catalog import rows_of
from verl_patches.cli.output import Json, print_json, report_plan, say, say_command, table
from verl_patches.cli.run import Overrides, Upstream, VerlPath, check_switches
from verl_patches.config.compose import compose, keys_of
from verl_patches.config.files import check_files
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.planning.memory_plan import host_limit
from verl_patches.planning.plan import patch_table
from verl_patches.planning.search import NoLayout, search
from verl_patches.planning.step_plan import Workload
from verl_patches.planning.verdict import nearest_preset
from verl_patches.upstream.checkouts import for_platform, trees_of

CONFIG_HELP = "A file of configs/, such as deepseekv3_256die_true_weight."
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
    if lacks := [check for check in check_files(config, keys_of(overrides), trees) if not check.ok]:
        raise RecipeError("no layout is searched: " + "; ".join(f"{check.name}: {check.detail}" for check in lacks))
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node if dies is None else dies
    on = [row["id"] for row in patch_table(config, rows_of(config.recipe.platform)) if row["on"]]
    try:
        layouts = search(config, on, dies, workload, top)
    except NoLayout as error:
        preset = nearest_preset(config_name, dies, host_limit(config), on)
        raise ConfigError(f"{error}{'' if preset is None else f'. Nearest shipped preset: {preset[0]}'}") from None
    answer = {"config": config_name, "dies": dies, "modelled": True, "layouts": layouts}
    if as_json:
        print_json(answer)
    else:
        _show(answer, [*trees.option, *workload.option], overrides)


def _show(answer: dict[str, Any], option: Sequence[str], overrides: list[str]) -> None:
    layouts, rows = answer["layouts"], []
    for number, row in enumerate(layouts, 1):
        phases = {phase["phase"]: phase["seconds"] for phase in row["phases"]}
        seconds = [f"{phases[name]:.1f}" for name in ("rollout", "update")]
        train = row["train"].partition(" etp")[0]
        sizes = (str(row["micro_batch"]), str(row["recompute_layers"]), f"{row['peak_bytes'] / 1e9:.1f}")
        speed = f"{row['total_s']:.1f}", f"{row['tokens_per_s_per_die']:.1f}"
        rows.append((str(number), *speed, *seconds, train, row["rollout"], *sizes))
    columns = ("", "step s", "tokens / s / die", "rollout", "update", "train", "rollout layout")
    title = f"fastest layouts of {answer['config']} on {answer['dies']} dies (modelled)"
    table(title, (*columns, "micro batch", "recompute layers", "peak GB"), rows)
    for number, row in enumerate(layouts, 1):
        replaced = set(keys_of(row["overrides"]))
        kept = [each for each, key in zip(overrides, keys_of(overrides), strict=True) if key not in replaced]
        command = ["python", "-m", "verl_patches", "plan", answer["config"], *option, *kept, *row["overrides"]]
        say_command(f"{number}:", shlex.join(command))
    say(f"fits: {len(layouts)} layouts on {answer['dies']} dies; next: one of the commands above", "bold green")
