"""Define the commands `weights convert`, `weights export` and `weights verify`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from verl_patches.cli.output import Json, print_json, progress_bar
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import parse_layout
from verl_patches.run.compose import output_root
from verl_patches.weights.manifest import (
    CRITIC,
    MANIFEST,
    TRACKER,
    folder_problems,
    has_manifest,
    holds_critic_alone,
    read_manifest,
)
from verl_patches.weights.megatron import crc_problems
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.run_folders import checkpoint_chain, find_start, require_start
from verl_patches.weights.source import INDEX, open_source

GB = 1e9
LAYOUT_HELP = 'Write Megatron\'s checkpoint for this layout, such as "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7".'
LINE_HELP = "The Megatron whose parameters are used: a3 (MindSpeed-LLM) or pypi."
DTYPE_HELP = "bf16 or keep; default: bf16 of a source in FP8, else keep."
EXPORT_HELP = "A run (its newest checkpoint), a checkpoint, or a folder of Megatron's checkpoint."
PROCESSES_HELP = "Files that are written at a time; default: one per core, fewer if memory is short."

app = typer.Typer(no_args_is_help=True, help="Convert, export and verify weights on disk.")
Folder = Annotated[Path, typer.Argument(help="A HF folder, a Megatron folder or a checkpoint.", show_default=False)]
Processes = Annotated[int | None, typer.Option(help=PROCESSES_HELP, min=1)]


@app.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A HF folder, a Megatron folder or a checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new folder, or an unfinished one to continue.")],
    layout: Annotated[str | None, typer.Option(help=LAYOUT_HELP)] = None,
    hf: Annotated[bool, typer.Option("--hf", help="Write a HF folder.")] = False,
    line: Annotated[Literal["a3", "pypi"], typer.Option(help=LINE_HELP)] = "a3",
    dtype: Annotated[Literal["bf16", "keep"] | None, typer.Option(help=DTYPE_HELP)] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Convert weights between a HF folder (bf16 or FP8) and Megatron's checkpoint.

    The same command continues an interrupted one.
    """
    start = time.perf_counter()
    if hf == (layout is not None):
        raise ConfigError("weights convert: expected one of --hf and --layout TEXT, found both or neither")
    opened = open_source(source)
    plan = plan_conversion(opened, None if layout is None else parse_layout(layout), dtype, line=line)
    from verl_patches.weights.convert import convert  # imports torch

    with progress_bar("convert", sum(file.size_bytes for file in plan.files)) as advance:
        done = convert(plan, destination, processes, advance)
    seconds, left_out = round(time.perf_counter() - start, 1), len(opened.left_out)
    if as_json:
        facts = {"source": str(opened.folder), "layout": layout, "dtype": plan.dtype, "left_out": left_out}
        print_json(facts | done._asdict() | {"seconds": seconds})
        return
    typer.echo(
        f"{destination}: {done.written} files written, {done.kept} kept; {done.read_bytes / GB:.3f} GB read, "
        f"{done.write_bytes / GB:.3f} GB written in {seconds} s; {left_out} tensors of multi-token prediction or of "
        "rotary frequencies left out"
    )


@app.command("export")
def export_command(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help=EXPORT_HELP)],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new folder, or an unfinished one to continue.")],
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint or of a Megatron folder as a HF folder, as `convert --hf` does."""
    if not has_manifest(source) and not (source / TRACKER).is_file():
        other = ", or a checkpoint (global_step_N) with manifest.json, or a Megatron folder"
        run = find_start(source, output_root(), other)
        if (newest := checkpoint_chain(require_start(run)).newest()) is None:
            raise ConfigError(f"{run}: expected a complete checkpoint, found none; save one with trainer.save_freq=N")
        source = newest
    convert_command(source, destination, hf=True, processes=processes, as_json=as_json)


@app.command("verify")
def verify_command(folder: Folder, as_json: Json = False) -> None:
    """Check every byte of a checkpoint or a Megatron folder; a HF folder, without checksums, by headers and index."""
    start = time.perf_counter()
    if not folder.is_dir():
        raise ConfigError(
            f"weights verify: {folder}: no such folder, so nothing was checked; expected a HF model folder, a "
            "Megatron folder or a checkpoint: give its path, or download or convert the weights first (docs/weights.md)"
        )
    manifests, opened, problems = {}, [folder], []
    if has_manifest(folder):
        whole = manifests[""] = read_manifest(folder)
        if holds_critic_alone(whole):
            opened = []
        if (identity := whole.facts.get(CRITIC)) is not None:
            opened.append(folder / CRITIC)
            try:
                critic = manifests[f"{CRITIC}/"] = read_manifest(folder / CRITIC)
                if critic.identity != identity:
                    found = f"{critic.identity}: it is of another checkpoint"
                    problems.append(f"{CRITIC}/{MANIFEST}: expected identity {identity}, found {found}")
            except ConfigError as error:
                problems.append(str(error))
        size = sum(manifest.size_bytes for manifest in manifests.values())
        with progress_bar("verify", size) as advance:
            for name, manifest in manifests.items():
                problems += folder_problems(folder / name, manifest, advance)
        count = sum(len(manifest.files) for manifest in manifests.values())
        checked = f"{count} files, {size / GB:.3f} GB: sizes and sha256"
    elif (folder / TRACKER).is_file():
        problems += crc_problems(folder)
        checked = "names, shapes, sizes, and the CRC-32 of every record"
    else:
        checked = f"names, shapes, sizes and {INDEX}; a HF folder has no checksums"
    contents = list[str]()
    if not problems:
        try:
            for each in opened:
                source = open_source(each)
                dtypes = sorted({tensor.dtype for tensor in source.tensors.values()})
                contents.append(f"{source.kind}, {len(source.tensors)} tensors in {'/'.join(dtypes)}")
        except ConfigError as error:
            problems = [str(error)]
    seconds = round(time.perf_counter() - start, 1)
    if as_json:
        result = {"contents": contents, "checked": checked, "problems": problems, "seconds": seconds}
        print_json({"folder": str(folder), **result})
    else:
        for problem in problems:
            typer.echo(f"problem: {problem}")
        typer.echo(f"{folder}: {'; '.join(contents)}; {len(problems)} problems; checked: {checked}; {seconds} s")
    raise typer.Exit(1 if problems else 0)
