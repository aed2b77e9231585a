"""Define the commands `smoke`, `train` and `plan`: check everything, and start a run and report its end, or plan it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NoReturn

import psutil
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_patches.catalog import platform_rows
from verl_patches.cli.output import (
    Json,
    print_json,
    print_screen,
    print_table,
    print_text,
    print_whole_plan,
    progress_bar,
)
from verl_patches.errors import INTERRUPTION_PREFIX, Check, ConfigError, RecipeError, our_command, require_checks
from verl_patches.launch import launcher, ray_cluster, smoke
from verl_patches.launch.bringup.bringup import MEASURED
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import PATCHES_VAR, parse_switches, switched_off_text
from verl_patches.plan.memory_plan import with_planned_keys
from verl_patches.plan.plan import build_plan, host_memory_note, plan_without_layout
from verl_patches.plan.search import ANY_LAYOUT_KEYS, as_overrides, search
from verl_patches.plan.step_model import Constants
from verl_patches.plan.step_plan import DISK_GB_S, Workload
from verl_patches.platform import require_platform
from verl_patches.rules import RULES
from verl_patches.run import run_folder
from verl_patches.run.compose import compose, output_root, override_keys
from verl_patches.run.files import disk_checks, total_steps, with_required_files
from verl_patches.run.record.loggers import require_loggers
from verl_patches.run.record.plots import plan_figure, save_figure
from verl_patches.run.record.record import SUMMARY_FILE, read_object, read_summary
from verl_patches.run.resolve import LayoutError
from verl_patches.spec import RunSpec, Trees
from verl_patches.step.replay.recording import recorded_lengths
from verl_patches.trainer.record import NOW_FILE, STEP_PREFIX
from verl_patches.upstream.checkouts import find_trees, require_trees
from verl_patches.upstream.modified import refuse_modified
from verl_patches.values import printable
from verl_patches.weights.run_folders import checkpoint_chain, find_start, require_start

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Any further Hydra overrides.")]
CONFIG_HELP = "A file of configs/, such as deepseekv3_256die_true_weight."
ConfigName = Annotated[str, typer.Option(help=CONFIG_HELP)]
REPLAY_HELP = "Train on the responses that another run recorded: its name, its folder, or the rollouts in it."
DRY_RUN_HELP = "Check and print everything; start and write nothing."
UPSTREAM_HELP = "Folder with the clones of scripts/fetch_upstream.sh, for line a3."
STAGE_REPEAT_S = 15.0
_SIDES = "train", "rollout"
EXPERT_LOAD_STEPS = 10  # last steps of a run that its expert load is taken from
WIDE_HELP = "Show all columns of the step table: also the other phases, the weight sync and the dispatch."
Wide = Annotated[bool, typer.Option("--wide", help=WIDE_HELP)]
EMULATE_HELP = "Platform npu_emulated: vLLM's engine V1 with vllm-ascend, on an emulated device."
Upstream = Annotated[Path | None, typer.Option("--upstream", help=UPSTREAM_HELP)]
SEARCH_HELP = "List the fastest layouts on --dies (on Atlas A2 by traffic)."
DIES_HELP = "With --search: dies; default: the config's."
TOP_HELP = "With --search: number of layouts."
PROMPT_HELP = "Mean tokens of a prompt."
RESPONSE_HELP = "Mean tokens of responses before truncation."
LENGTHS_HELP = "A run whose recorded lengths are used."
LOAD_HELP = "A run whose measured load of experts is used."
MEASURED_HELP = "measured.json of a bring-up."
DISK_HELP = f"GB/s of the disks of all nodes; default: measured, or {DISK_GB_S:g}."
PLOT_HELP = "Draw the memory of the fullest die over a step."
WHOLE_HELP = "Print every check, row, variable and command too."
Whole = Annotated[bool, typer.Option("--all", help=WHOLE_HELP)]


def _run_or_path(path: Path | None) -> Path | None:
    """Return the value of --replay-rollout: a path, or the folder of a run that it names."""
    places = [] if path is None else [path, output_root() / path]
    if places and not any(place.exists() for place in places):
        raise typer.BadParameter(f"{path}: expected a path or the name of a run in {output_root()}, found neither")
    return next((place for place in places if place.exists()), None)


def smoke_command(
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="GRPO steps; default: 3, with --learn 40.")] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option()] = "fp32",
    replay_rollout: Annotated[Path | None, typer.Option(metavar="RUN", callback=_run_or_path, help=REPLAY_HELP)] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Train on a task that the tiny model can learn.")] = False,
    run: Annotated[str | None, typer.Option(help="Name; its first start writes to outputs/NAME/0001.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of model, data and sampling.")] = 0,
    line: Annotated[Literal["pypi", "a3"], typer.Option(help="The set of pins to run.")] = "pypi",
    emulate_npu: Annotated[bool, typer.Option("--emulate-npu", help=EMULATE_HELP)] = False,
    upstream: Upstream = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Run GRPO of a tiny DeepSeek-V3 with verl, Megatron, vLLM and Ray on this machine's CPU.

    Overrides layout=NAME (configs/layout) and rollout=NAME (configs/rollout) split training and vLLM over workers;
    algo=NAME (configs/algo) chooses another algorithm.
    """
    overrides = overrides or []
    options = smoke.SmokeOptions(overrides, steps, dtype, replay_rollout, learn, run, seed, line, emulate_npu)
    inputs = smoke.smoke_inputs(options, output_root() / "cache")
    all_overrides = smoke.smoke_overrides(options, inputs.overrides)
    spec = compose_run(options.config_name, all_overrides, find_trees(upstream))
    spec = replace(spec, given_keys=frozenset(override_keys(overrides)))  # model and data are made below
    off = _require_startable(spec)
    dirty = refuse_modified(spec)
    ray_cluster.require_nodes(spec)
    require_checks(disk_checks(spec, starts=True))
    with _progress_display(as_json, wide, off) as show:
        inputs.make(lambda text: show(f"~ {text}"))
        require_checks(_file_checks(spec))
        outcome = launcher.run(spec, show, dirty=dirty)
    _report_outcome(outcome, spec, as_json, off)


def train_command(
    config_name: ConfigName,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN_HELP)] = False,
    upstream: Upstream = None,
    wide: Wide = False,
    whole: Whole = False,
    as_json: Json = False,
) -> None:
    """Run a config of this repository, or show what a run would do.

    A check that refuses the start is wrong input, exit code 2; with --dry-run it is what was asked for, exit code 1.
    """
    overrides, trees = overrides or [], find_trees(upstream)
    if dry_run:
        report_plan(config_name, overrides, trees, Workload(), as_json, whole)
    run = compose_run(config_name, overrides, trees)
    outcome, off = start_run(run, as_json, wide)
    _report_outcome(outcome, run, as_json, off)


def start_run(
    run: RunSpec, silent: bool, wide: bool = False, often: Callable[[], None] = lambda: None
) -> tuple[launcher.Outcome, str]:
    """Check a run, start it and wait for its end; return the outcome, and a sentence that names rows switched off.

    `often` is called several times a second. Raise ConfigError where the run cannot start.
    """
    off = _require_startable(run)
    run_folder.require_lasting_folders(run)
    require_platform(run.platform, f"add --dry-run to look at the run here; on a CPU run {our_command('smoke.sh')}")
    dirty = refuse_modified(run)
    ray_cluster.require_nodes(run)
    require_checks([*_file_checks(run), *disk_checks(run, starts=True)])
    with _progress_display(silent, wide, off) as show:

        def on_line(line: str) -> None:
            show(line)
            often()

        return launcher.run(run, on_line, dirty=dirty), off


def _require_startable(run: RunSpec) -> str:
    """Refuse a run that cannot start, by ConfigError and before anything is written.

    Return a sentence that names the rows that the user has switched off.
    """
    require_trees(run)
    if run.recipe.ray_address is None:  # otherwise the controller, which checks its own, has the variables of that Ray
        require_loggers(run.verl.trainer.logger, os.environ)
    run_folder.require_start(run)
    require_checks(RULES.checks(run))
    return switched_off_text(run.switches.switched_off(platform_rows(run.platform)))


def plan_command(
    config_name: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    overrides: Overrides = None,
    searched: Annotated[bool, typer.Option("--search", help=SEARCH_HELP)] = False,
    dies: Annotated[int | None, typer.Option(help=DIES_HELP)] = None,
    top: Annotated[int, typer.Option(min=1, max=20, help=TOP_HELP)] = 5,
    prompt_tokens: Annotated[float | None, typer.Option(help=PROMPT_HELP)] = None,
    response_tokens: Annotated[float | None, typer.Option(help=RESPONSE_HELP)] = None,
    lengths: Annotated[Path | None, typer.Option(metavar="RUN", help=LENGTHS_HELP)] = None,
    expert_load: Annotated[Path | None, typer.Option(metavar="RUN", help=LOAD_HELP)] = None,
    disk_gb_s: Annotated[float | None, typer.Option(help=DISK_HELP)] = None,
    measured: Annotated[Path | None, typer.Option(metavar="FILE", help=MEASURED_HELP)] = None,
    upstream: Upstream = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help=PLOT_HELP)] = None,
    whole: Whole = False,
    as_json: Json = False,
) -> None:
    """Check a config, and print layout, memory and modelled step time on one screen; nothing is started.

    The exit code is 1 if a check refuses the start.
    """
    overrides, trees = overrides or [], find_trees(upstream)
    found = {} if measured is None else _read_measured(measured)
    rate = found.get("disk_gb_s") or DISK_GB_S if disk_gb_s is None else disk_gb_s
    workload = Workload(prompt_tokens, response_tokens, disk_gb_s=rate)
    workload = replace(workload, measured=found.get("constants", {}))
    if lengths is not None:
        recorded = recorded_lengths(str(find_start(lengths, output_root())))
        workload = replace(workload, lengths=str(lengths), recorded=recorded)
    if expert_load is not None:
        workload = replace(workload, expert_load=str(expert_load), loads=_expert_loads(expert_load))
    if dies is not None and not searched:
        raise ConfigError(f"--dies {dies} needs --search; a plan has trainer.nnodes x trainer.n_gpus_per_node dies")
    if searched and (whole or plot):
        raise ConfigError("--search lists layouts: expected neither --all nor --plot with it")
    if not searched:
        report_plan(config_name, overrides, trees, workload, as_json, whole, plot)
    answer = search_layouts(config_name, overrides, trees, dies, workload, top)
    if as_json:
        print_json(answer)
    else:
        _print_layouts(answer, [*trees.option, *workload.option], overrides)


def compose_run(config_name: str, overrides: Sequence[str], trees: Trees) -> RunSpec:
    """Return the facts of a run, ready for plan and start: automatic recomputation has its number of layers.

    Raise ConfigError where `check_switches` refuses the run's switches.
    """
    run = compose(config_name, overrides, platform_rows, trees)
    check_switches(run)
    return with_planned_keys(run)


def check_switches(run: RunSpec) -> None:
    """Refuse to switch off a row that another row needs, and a VERL_PATCHES in the shell that differs from the run."""
    in_shell = os.environ.get(PATCHES_VAR)
    Engine(platform_rows(run.platform), run.process_switches)
    # `restart_in_environment` has added rows to the variable
    if in_shell and replace(parse_switches(in_shell), rows=None) != run.switches:
        raise ConfigError(
            f"{PATCHES_VAR} is {in_shell!r} in this shell, but the configuration says {run.switches.text()!r}, which "
            f"is what runs; unset {PATCHES_VAR} and give rows as 'recipe.patches=[-row.id]'"
        )


def report_plan(
    config_name: str,
    overrides: Sequence[str],
    trees: Trees,
    workload: Workload,
    as_json: bool,
    whole: bool = False,
    plot: Path | None = None,
) -> NoReturn:
    """Print the plan of a run on one screen, whole or as JSON; exit with 0, or 1 if a check failed."""
    try:
        run = compose_run(config_name, overrides, trees)
        require_trees(run)
        rows = platform_rows(run.platform)
        other = _other_level(run, config_name, overrides, trees)
        plan = build_plan(run, RULES.checks(run), config_name, overrides, rows, workload, other)
    except LayoutError as error:
        run, plan = None, plan_without_layout(error, config_name, trees, overrides, workload)
    if plot is not None:
        if not plan["memory"]:
            raise ConfigError(f"--plot {plot}: {plan['verdict']}, so that there is no memory to draw")
        save_figure(plan_figure(plan["config"], plan["memory"]), plot)
    if as_json:
        print_json(plan)
    else:
        if whole and run is not None:
            print_whole_plan(plan, run)
        print_screen(plan, run)
    raise typer.Exit(0 if plan["ok"] else 1)


def _other_level(run: RunSpec, config_name: str, overrides: Sequence[str], trees: Trees) -> RunSpec | None:
    """Return the run at level reference, or at tuned where it is at reference; None where that is refused."""
    level = "tuned" if run.recipe.level == "reference" else "reference"
    unchanged = [each for each in overrides if not each.startswith("level=")]
    with suppress(ConfigError):
        return compose_run(config_name, [*unchanged, f"level={level}"], trees)
    return None


def search_layouts(
    config_name: str, overrides: Sequence[str], trees: Trees, dies: int | None, workload: Workload, top: int
) -> dict[str, Any]:
    """Return {config, dies, modelled, layouts}: the best layouts for a configuration, whose own may be invalid."""
    run = compose(config_name, [*overrides, *as_overrides(ANY_LAYOUT_KEYS)], platform_rows, trees)
    check_switches(run)
    if failed := [check for rule in RULES.files for check in rule(run) if not check.ok]:
        raise RecipeError("no layout is searched: " + "; ".join(f"{check.name}: {check.detail}" for check in failed))
    dies = run.world_size if dies is None else dies
    with progress_bar("layouts tried", None, "") as advance:
        layouts = search(run, RULES.sizes, dies, workload, top, advance)
    return {"config": config_name, "dies": dies, "modelled": True, "layouts": layouts}


def _read_measured(path: Path) -> dict[str, Any]:
    """Return the content of a bring-up's measured.json; raise ConfigError for any other file."""
    found = read_object(path) if path.is_file() else {}
    constants = found.get("constants")
    names = {field.name for field in fields(Constants)}
    if not isinstance(constants, dict) or not constants.keys() <= names:
        raise ConfigError(f"--measured {path}: expected {MEASURED} of a bring-up, found another file, or none")
    return found


def _expert_loads(run: Path) -> tuple[float, float]:
    """Return the busiest rank's tokens over the mean in training and rollout, from a run's last steps.

    Raise ConfigError where the run has none.
    """
    steps = read_summary(find_start(run, output_root())).get("steps", [])[-EXPERT_LOAD_STEPS:]
    records = [step["expert_load"] for step in steps if step.get("expert_load")]
    train, rollout = (
        [load for each in records if (load := (each.get(side) or {}).get("ranks_over_mean"))] for side in _SIDES
    )
    if not train:
        raise ConfigError(f"--expert-load {run}: no step of it has a load; give a run with recipe.expert_load=true")
    return fmean(train), fmean(rollout or train)


def _print_layouts(answer: dict[str, Any], option: Sequence[str], overrides: list[str]) -> None:
    layouts, rows = answer["layouts"], []
    timed = layouts[0]["total_s"] is not None
    for number, row in enumerate(layouts, 1):
        if timed:
            bounds = {"step": row["total_range_s"]} | {each["phase"]: each["range_s"] for each in row["phases"]}
            ranges = (bounds[name] for name in ("step", "rollout", "update"))
            figures = [f"{row['total_s']:.1f}", *(f"{low:.0f} to {high:.0f}" for low, high in ranges)]
        else:
            figures = [f"{row['sent_bytes'] / 1e9:.1f}"]
        layers = row["recompute_layers"]
        layers = str(layers) if isinstance(layers, int) else ",".join(map(str, layers))
        sizes = row["train"].partition(" etp")[0], row["rollout"], layers, f"{row['peak_bytes'] / 1e9:.1f}"
        rows.append((str(number), *figures, *sizes))
    columns = ("modelled", "step s", "rollout", "update") if timed else ("GB sent a step and die",)
    title = f"{'fastest layouts' if timed else 'layouts with least traffic'} of {answer['config']}"
    columns = ("", *columns, "train", "rollout layout", "recompute layers", "peak GB")
    print_table(f"{title} on {answer['dies']} dies (modelled)", columns, rows)
    for number, row in enumerate(layouts, 1):
        replaced = set(override_keys(row["overrides"]))
        unchanged = [each for each, key in zip(overrides, override_keys(overrides), strict=True) if key not in replaced]
        command = our_command("plan", answer["config"], *option, *unchanged, *row["overrides"])
        print_text(f"{number}: {command}", whole=True)
    note = host_memory_note(row["host"] for row in layouts)
    verdict = f"fits: {len(layouts)} layouts on {answer['dies']} dies{note}; next: one of the commands above"
    print_text(verdict, "bold green")


def _file_checks(run: RunSpec) -> Iterator[Check]:
    """Yield the checks of the rules about files at a start, when all files must exist on this machine."""
    run = with_required_files(run)
    for rule in RULES.files:
        yield from rule(run)


@contextmanager
def _progress_display(silent: bool, wide: bool = False, first: str = "") -> Iterator[Callable[[str], None]]:
    """Yield a function that shows lines of progress.log (trainer/record.py): permanent ones, the step table, the stage.

    `wide`: the table's "+ " lines, else its "- " lines. The stage ("~ ") stands below them with the seconds since this
    process began; in a pipe or file it has a line of its own, and only until step 1. `first` is shown at once.
    """
    console = Console(quiet=silent, highlight=False, markup=False, soft_wrap=True)
    shown_prefixes, piped = ("| ", "= ", "+ " if wide else "- "), not console.is_terminal
    began = time.monotonic() - (time.time() - psutil.Process().create_time())
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, transient=True, disable=silent or piped) as stage:
        now = stage.add_task("starting")
        stage.tasks[0].start_time = began

        last, again_at = "", 0.0  # the stage of the start, and when it is shown again in a pipe

        def show(line: str) -> None:
            nonlocal last, again_at
            text, seconds = printable(line[2:]), time.monotonic() - began
            if line.startswith("~ "):
                stage.update(now, description=text)
                again_at = 0.0
                last = "" if line.startswith(STEP_PREFIX) else text
            if line.startswith(shown_prefixes):
                console.print(text)
            elif piped and last and seconds >= again_at:
                again_at = seconds + STAGE_REPEAT_S
                console.print(f"[{seconds:4.0f} s] {last}")

        show(f"| {first}" if first else "")
        yield show


def _report_outcome(outcome: launcher.Outcome, run: RunSpec, as_json: bool, off: str = "") -> None:
    """Print how a run ended, the rows that were `off`, and what it proved or how to go on; exit with its code."""
    if as_json:
        typer.echo((outcome.folder / "summary.json").read_text())
    elif outcome.code == 0:
        peak = outcome.peak_rss_bytes.get("total", 0) / 2**30
        typer.echo(
            f"ok in {outcome.wall_s:.0f} s, peak memory {peak:.1f} GiB (RSS of all processes); "
            f"results in {outcome.folder}" + (f"; {off}" if off else "")
        )
        if proof := smoke.PROOF_TEXTS.get(f"{run.line} {run.platform}"):
            compared = run.recipe.weight_sync.enabled and run.recipe.logprob_check.action == "stop"
            if not run.samples:
                proof = "training on fixed data runs here, without a rollout engine"
            exceptions = "" if compared and not off else "that vLLM holds the actor's weights and every row works, "
            typer.echo(f"This proved: {proof}.\nIt did not prove: {exceptions}{smoke.UNPROVED_TEXT}.")
        typer.echo("\n".join(["next:", *(f"  {command}" for command in _next_commands(run))]))
    if outcome.code:
        logs = f"  log: {outcome.folder / 'driver.log'}"
        if (outcome.folder / "ray_logs").is_dir():
            logs += f"\n  Ray's logs: {outcome.folder / 'ray_logs'}"
        ended = "was" if outcome.reason.startswith(INTERRUPTION_PREFIX) else f"failed after {outcome.wall_s:.0f} s:"
        text = f"verl_patches: the run {ended} {outcome.reason}\n{logs}"
        text += f"\n  {off}" if off else ""
        typer.echo(printable(text, keep="\n\t"), err=True)
        for line in _resume_advice(run, outcome.folder):
            typer.echo(printable(f"  {line}", keep="\n\t"), err=True)
    # 2: the controller found an input wrong; > 128: ended by a signal
    raise typer.Exit(outcome.code if outcome.code == 2 or outcome.code > 128 else min(outcome.code, 1))


def _next_commands(run: RunSpec) -> list[str]:
    """Return three commands for a run that has ended well: look at it, read its samples, go on."""
    name = run.home.name if run.home.parent == output_root() else str(run.home)
    third = our_command("plan", "moonlight_16die")
    if run.verl.trainer.save_freq > 0:
        exported = our_command("weights", "export", name, f"{name}-hf")
        third = our_command("eval", name, f"{name}-scores", *run.trees.option) if run.samples else exported
    second = our_command("samples", name) if run.samples and run.recipe.rollout.record else our_command("report", name)
    return [our_command("status", name), second, third]


def _resume_advice(run: RunSpec, record: Path) -> list[str]:
    """Return lines about the newest whole checkpoint of a run that ended early, and the command that resumes from it.

    Runs that save no checkpoints have none.
    """
    if run.verl.trainer.save_freq <= 0 or "checkpoint.save" not in run.rows:
        return []
    try:
        if run.verl.trainer.resume_mode == "resume_path" and not read_object(record / SUMMARY_FILE).get("checkpoints"):
            return [f"no checkpoint was saved: the same command resumes from {run.verl.trainer.resume_from_path} again"]
        checkpoint = checkpoint_chain(require_start(record)).newest()
        total = read_object(record / NOW_FILE).get("steps") or total_steps(run)
    except (ConfigError, OSError) as error:  # a ConfigError says what to go on from instead
        return [str(error)]
    if checkpoint is None:
        return [f"no complete checkpoint of this run in {run.home}: the same command starts again from step 1"]
    if checkpoint.name == f"global_step_{total}":
        return [f"newest complete checkpoint: {checkpoint}, of the last step: all steps are done and saved"]
    keys = ("trainer.resume_mode", "trainer.resume_from_path")
    other_words = (word for word in sys.argv[1:] if word.lstrip("+").partition("=")[0] not in keys)
    command = our_command(*other_words, "trainer.resume_mode=auto")
    return [f"newest complete checkpoint: {checkpoint}", f"to resume from it: {command}"]
