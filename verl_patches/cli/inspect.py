"""Define `config` and `reshard-plan`, which show a configuration and a weight sync, `report`, `compare`, `samples`."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf

from verl_patches.cli.output import Json, console, print_data, print_json, print_table, print_text
from verl_patches.cli.run import ConfigName, Overrides, Upstream, compose_run
from verl_patches.errors import ConfigError, RecipeError, our_command, require_checks
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.model.mindspeed.arguments import engine_settings
from verl_patches.reshard import check
from verl_patches.reshard.plan import plan_reshard
from verl_patches.rewards.parts import REWARD_PREFIX
from verl_patches.run.compose import output_root
from verl_patches.run.files import hook_checks
from verl_patches.run.record import compare
from verl_patches.run.record.curves import METRICS, read_curves
from verl_patches.run.record.record import read_summary
from verl_patches.run.record.report import figures
from verl_patches.run.resolve import CONFIGS_DIR
from verl_patches.spec import RunSpec
from verl_patches.step.replay.recording import TEXT_COLUMNS
from verl_patches.tools.data.samples import read_samples
from verl_patches.upstream.checkouts import GIT_LINE, compare_verl_version, find_trees
from verl_patches.weights.run_folders import find_start

DEFAULT_MODEL = CONFIGS_DIR / "model" / "deepseekv3_671b.json"
RUNS_HELP = "Folders of runs, or their names in outputs/ of this repository."
TRAIN_HELP = 'Training layout, such as "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7".'
EXPLAIN_HELP = "Print the arguments of MindSpeed that each key sets (line a3)."
ROLLOUT_HELP = 'Rollout layout, such as "tp2 ep128 etp1 @256": 2 instances of 128 ranks.'

CURVES_HELP = "A run, or a TensorBoard folder, JSON lines, CSV or a console log of any framework."
METRIC_HELP = f"Compare only this metric: {', '.join(METRICS)}, or a name of the sources; can be repeated."
LIMIT_HELP = "METRIC=VALUE: largest error allowed; default: reward=0.04, or without rewards loss=0.02."


def config_command(
    config_name: ConfigName,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help=EXPLAIN_HELP)] = False,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Print the composed config as YAML, or with --explain the training engine's arguments for each key."""
    run = compose_run(config_name, overrides or [], find_trees(upstream))
    require_checks(hook_checks(run))
    if explain and run.line != GIT_LINE:
        raise ConfigError(
            f"--explain is about the engine of line {GIT_LINE}, but recipe.line is {run.line}: "
            f"add recipe.line={GIT_LINE}, or omit --explain"
        )
    fits, sentence = compare_verl_version(run.line, run.trees)
    if not fits:
        print_text(f"verl_patches: note: the defaults shown are of a verl that a run refuses: {sentence}", err=True)
    if explain:
        _print_arguments(run, config_name, as_json)
    elif as_json:
        print_json(OmegaConf.to_container(run.verl))
    else:
        typer.echo(OmegaConf.to_yaml(run.verl), nl=False)


def _print_arguments(run: RunSpec, config_name: str, as_json: bool) -> None:
    """Print what each key becomes; the exit code is 1 where one is refused."""
    rows = engine_settings(run.verl.actor_rollout_ref, run.recipe, run.hf_config)
    refused = [row for row in rows if row.how == "refused"]
    settings, keys = [row._asdict() for row in rows], [row.key for row in refused]
    found = {"config": config_name, "line": run.line, "settings": settings, "refused": keys}
    if as_json:
        print_json(found)
    else:
        print_data(found, "arguments of Megatron and MindSpeed")
    for row in refused:
        print_text(f"verl_patches: {row.key} is {row.value}: {row.why}", err=True)
    raise typer.Exit(1 if refused else 0)


def reshard_plan_command(
    train: Annotated[str, typer.Option(help=TRAIN_HELP)],
    rollout: Annotated[str, typer.Option(help=ROLLOUT_HELP)],
    model: Annotated[Path, typer.Option(help="An HF config.json.", show_default="DeepSeek-V3")] = DEFAULT_MODEL,
    param: Annotated[str | None, typer.Option(help="Name of a HF tensor: print how it reaches --rank.")] = None,
    rank: Annotated[int | None, typer.Option(help="The rank for --param.")] = None,
    as_json: Json = False,
) -> None:
    """Plan the weight sync between two layouts, verify the plan, and print its cost."""
    if (param is None) != (rank is None):
        raise ConfigError("reshard-plan: expected both --param and --rank, or neither: name one HF tensor and one rank")
    start = time.perf_counter()
    layouts = _parse_layout_option("--train", train), _parse_layout_option("--rollout", rollout)
    if rank is not None and not 0 <= rank < layouts[0].world_size:
        raise ConfigError(f"reshard-plan: --rank {rank}: expected 0 to {layouts[0].world_size - 1}")
    plan = plan_reshard(build_inventory(model), *layouts, train_library="mindspeed", rollout_library="vllm-ascend")
    seconds = time.perf_counter() - start
    if param is not None and rank is not None:
        found = check.tensor_path(plan, param, rank)
    else:
        check.check_plan(plan)  # every rollout element is written exactly once, from its own training element
        found = {**check.figures(plan), "proven": True, "planning_s": round(seconds, 2)}
    if as_json:
        print_json(found)
    else:
        print_data(found, f"{train} to {rollout}")


def _parse_layout_option(option: str, text: str) -> ParallelLayout:
    try:
        return parse_layout(text)
    except ConfigError as error:
        raise ConfigError(f'reshard-plan: {option} "{text}": {error} (etp defaults to tp)') from error


def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help=RUNS_HELP)], as_json: Json = False
) -> None:
    """Show medians and other figures of recorded runs, side by side."""
    summaries = {}
    for run in runs:
        folder = find_start(run, output_root())
        summaries[str(run)] = summary = read_summary(folder)
        if not summary.get("steps"):
            raise RecipeError(f"{folder} has no finished step to report; `{our_command('status', str(run))}` says why")
    found = {name: figures(summary) for name, summary in summaries.items()}
    if as_json:
        print_json(found)
        return
    rows = []
    for name in dict.fromkeys(name for each in found.values() for name in each):
        values = [each.get(name) for each in found.values()]
        if any(value is not None for value in values):
            rows.append((name, *("-" if value is None else f"{value:.4g}" for value in values)))
    print_table("medians without the first step, unless a name says otherwise", ("figure", *found), rows)


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help=CURVES_HELP)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The reference, as A.")],
    metric: Annotated[list[str] | None, typer.Option(help=METRIC_HELP)] = None,
    limit: Annotated[list[str] | None, typer.Option(help=LIMIT_HELP)] = None,
    as_json: Json = False,
) -> None:
    """Compare A's training curves with B's by the mean errors of the Ascend pages of verl and OpenRLHF.

    The exit code is 1 if an error exceeds its limit.
    """
    limits = dict(map(_parse_limit, limit or ())) or None
    metrics = {name: METRICS.get(name, (name,)) for name in [*(metric or METRICS), *(limits or ())]}
    curves_a, curves_b = (read_curves(given, output_root(), metrics) for given in (a, b))
    errors = compare.curve_errors(curves_a, curves_b)
    limits = limits or compare.limits_for(errors)
    checks = compare.limit_checks(errors, limits)
    ok = all(check.ok for check in checks)
    if as_json:
        sources = {"a": curves_a, "b": curves_b}.items()
        result: dict[str, Any] = {name: {"name": of.name, "kind": of.kind} for name, of in sources}
        result |= {"rule": compare.RULE, "limits": limits}
        result["errors"] = [error.as_dict() for error in errors]
        print_json({**result, "checks": [vars(check) for check in checks], "ok": ok})
    else:
        title = f"a, judged: {curves_a.name} ({curves_a.kind}); b, the reference: {curves_b.name} ({curves_b.kind})"
        print_text(title)
        columns = "metric name steps absolute relative largest at".split()
        rows = [error.as_dict() | {"name": ", ".join(dict.fromkeys(error.names))} for error in errors]
        print_data({"errors": [{column: row[column] for column in columns} for row in rows]}, "compare")
        for check in checks:
            print_text(f"{'ok' if check.ok else 'FAILED'}: {check.name}: {check.detail}", "" if check.ok else "red")
    raise typer.Exit(0 if ok else 1)


def _parse_limit(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if name and 0 <= float(value) < float("inf"):
            return name, float(value)
    raise ConfigError(f"compare: --limit {text}: expected METRIC=VALUE, a fraction from 0, such as loss=0.02")


def samples_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or one of its starts.")],
    step: Annotated[int | None, typer.Option(help="Default: the newest that is recorded.")] = None,
    sample: Annotated[int | None, typer.Option(help="Show this one alone.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest reward first.")] = False,
    cut: Annotated[bool, typer.Option("--cut", help="Only responses that end at the length limit.")] = False,
    grep: Annotated[str | None, typer.Option(metavar="TEXT", help="Only where prompt or response has TEXT.")] = None,
    as_json: Json = False,
) -> None:
    """Show the responses of a step with their rewards; in a terminal one at a time."""
    if best and worst:
        raise ConfigError("samples: expected --best or --worst, found both; leave out one")
    every = read_samples(find_start(run, output_root()), step)
    chosen = (one for one in every if sample in (None, one["sample"]) and (one["cut"] or not cut))
    found = (one for one in chosen if not grep or grep in one["prompt"] or grep in one["response"])
    shown = sorted(found, key=lambda one: one["reward"], reverse=best) if best or worst else found
    if as_json:
        print_json(listed := [*shown])
        raise typer.Exit(0 if listed else 1)
    if not (listed := [*shown]):
        raise RecipeError(f"samples: {run}: no response of the step is as the options say; leave out one of them")
    paged = console().is_terminal and sys.stdin.isatty()
    for number, one in enumerate(listed):
        if paged and number and input("Enter: the next one, q: end ") == "q":
            break
        if paged:
            console().clear()
        _print_sample(one)


def _print_sample(sample: dict[str, Any]) -> None:
    title = "step {step}, sample {sample}: reward {reward:.4g}, {tokens} tokens".format(**sample)
    texts = {f"{REWARD_PREFIX}{label}": f"{score:.4g}" for label, score in sample["parts"].items()}
    if sample["dlogp"]:
        texts["|dlogp|"] = "mean {mean:.2e}, largest {max:.2e}".format(**sample["dlogp"])
    texts |= {name: sample[name] or "-" for name in TEXT_COLUMNS if name in sample}
    print_table(f"{title}{', cut at the length limit' if sample['cut'] else ''}", ("", ""), [*texts.items()])
    for name in ("prompt", "response"):
        print_text(f"--- {name} ---", "bold")
        print_text(sample[name])
