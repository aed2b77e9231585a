"""The commands `weights convert`, `weights export`, `weights verify` and `weights show`."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.cli.output import Json, print_json, progress_bar, table
from verl_patches.config.compose import output_root
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import parse_layout
from verl_patches.weights.manifest import (
    CRITIC,
    MANIFEST,
    SAVED,
    folder_problems,
    has_manifest,
    holds_critic_alone,
    model_digest,
    read_manifest,
    recorded,
)
from verl_patches.weights.plan import FILE_BYTES, ConversionPlan, costs, parse_part, plan_conversion
from verl_patches.weights.run_folders import chain_of_start, find_start, read_start
from verl_patches.weights.source import INDEX, Source, open_source

GB = 1e9
LAYOUT_HELP = 'Write shards of this layout, such as "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7".'
DTYPE_HELP = "bf16, fp8 (with --hf) or keep.  [default: bf16 of a source in FP8, else keep]"
EXPORT_HELP = "A run (its newest checkpoint), a checkpoint, or shards."
PART_HELP = "Write only part I of N, such as 0/16 on the first of 16 nodes; DST may be shared."
FILE_HELP = "Most that a HF file holds, in GB."

app = typer.Typer(no_args_is_help=True, help="Convert, export, verify and show weights on disk.")
Folder = Annotated[Path, typer.Argument(help="A HF folder or one that this project wrote.", show_default=False)]


@app.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A HF folder, shards or a checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new folder, or an unfinished one to go on.")],
    layout: Annotated[str | None, typer.Option(help=LAYOUT_HELP)] = None,
    hf: Annotated[bool, typer.Option("--hf", help="Write a HF folder.")] = False,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    part: Annotated[str, typer.Option(help=PART_HELP)] = "0/1",
    file_gb: Annotated[float, typer.Option(help=FILE_HELP)] = FILE_BYTES / GB,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan of every part; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Convert weights between a HF folder (bf16 or FP8) and shards of a layout, in one pass that can be resumed."""
    start = time.perf_counter()
    if hf == (layout is not None):
        raise ConfigError("weights convert: expected one of --hf and --layout TEXT")
    if not 0 < file_gb < math.inf:
        raise ConfigError(f"weights convert: --file-gb {file_gb}: expected a finite number above 0")
    number, parts = parse_part(part)
    opened = open_source(source, only_plan=dry_run)
    plan = plan_conversion(opened, None if layout is None else parse_layout(layout), dtype, int(file_gb * GB))
    if dry_run:
        result = {**_summary(plan), "parts": costs(plan, parts), "planning_s": round(time.perf_counter() - start, 2)}
        if as_json:
            print_json(result)
        else:
            _show_plan(result, destination)
        return
    from verl_patches.weights.convert import convert  # imports torch

    size = sum(group.write_bytes for group in plan.share(number, parts))
    with progress_bar("convert", size) as advance:
        done = convert(plan, destination, number, parts, advance)
    result = {**_summary(plan), **done._asdict(), "seconds": round(time.perf_counter() - start, 1)}
    result["manifest"] = None if done.manifest is None else str(destination / "manifest.json")
    if as_json:
        print_json(result)
        return
    left_out = f", {len(opened.left_out)} tensors of uncounted layers left out" if opened.left_out else ""
    typer.echo(
        f"{destination}: {done.written} files written, {done.kept} kept; {done.read_bytes / GB:.3f} GB read, "
        f"{done.write_bytes / GB:.3f} GB written in {result['seconds']} s{left_out}"
    )
    if done.missing:
        typer.echo(f"not complete: {len(done.missing)} files of other parts are missing, as {done.missing[0]}")


@app.command("export")
def export_command(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help=EXPORT_HELP)],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new folder, or an unfinished one to go on.")],
    fp8: Annotated[bool, typer.Option("--fp8", help="In FP8 with block scales.")] = False,
    part: Annotated[str, typer.Option(help=PART_HELP)] = "0/1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan of every part; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint as a HF folder: `convert --hf`, with FP8 as a switch."""
    if not has_manifest(source):
        source = _newest_of_run(source)
    convert_command(
        source, destination, hf=True, dtype="fp8" if fp8 else None, part=part, dry_run=dry_run, as_json=as_json
    )


def _newest_of_run(given: Path) -> Path:
    """Return the newest checkpoint of a run or of a start; ConfigError for anything else."""
    if SAVED.fullmatch(given.name):
        raise ConfigError(f"weights export: {given}: no {MANIFEST}, so it is no complete checkpoint; give another one")
    run = find_start(given, output_root(), ", or a checkpoint (global_step_N) or shards, with manifest.json")
    if (newest := chain_of_start(read_start(run)).newest()) is None:
        raise ConfigError(f"weights export: {run} and the starts that it came from have no complete checkpoint")
    return newest


def _summary(plan: ConversionPlan) -> dict[str, Any]:
    source, target = plan.source, plan.manifest
    return {
        "source": str(source.folder),
        "from": f"{source.kind}, {_dtype_of(source)}",
        "to": f"{target.kind}, {target.dtype}",
        "layout": target.layout,
        "tensors": len(source.tensors),
        "left_out": len(source.left_out),
        "files": len(target.expected),
    }


def _dtype_of(source: Source) -> str:
    return "/".join(sorted({tensor.dtype for tensor in source.tensors.values()}))


def _show_plan(result: dict[str, Any], destination: Path) -> None:
    rows = []
    for part in result["parts"]:
        low, high = part["seconds_modelled"]
        sizes = [f"{part[key] / GB:.2f}" for key in ("read_bytes", "write_bytes", "host_bytes_modelled")]
        rows.append((part["part"], str(part["files"]), *sizes, f"{low / 60:.1f} to {high / 60:.1f}"))
    title = f"{result['source']} ({result['from']}) to {destination} ({result['to']})"
    columns = ("part", "files", "reads, GB", "writes, GB", "host memory, GB (modelled)", "minutes (modelled)")
    table(title, columns, rows)
    read, written = (sum(part[key] for part in result["parts"]) / GB for key in ("read_bytes", "write_bytes"))
    typer.echo(
        f"{result['tensors']} tensors, {result['left_out']} left out; {read:.2f} GB read, {written:.2f} GB written; "
        f"planned in {result['planning_s']} s; nothing was written"
    )


@app.command("verify")
def verify_command(folder: Folder, as_json: Json = False) -> None:
    """Check every byte of a folder against its manifest; a HF folder without one by headers, index and config."""
    start = time.perf_counter()
    if not folder.is_dir():
        raise ConfigError(
            f"weights verify: {folder}: no such folder, so nothing was checked; expected a HF model folder, shards or "
            "a checkpoint: give its path, or download or convert the weights first (docs/weights.md)"
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
                problems += [f"{name}{problem}" for problem in folder_problems(folder / name, manifest, advance)]
        count = sum(len(manifest.files) for manifest in manifests.values())
        checked = f"{count} files, {size / GB:.3f} GB: sizes and sha256"
    else:
        checked = f"names, shapes, sizes and {INDEX}; a folder without manifest.json has no checksums"
    if not problems:
        try:
            for each in opened:
                open_source(each)
        except ConfigError as error:
            problems = [str(error)]
    seconds = round(time.perf_counter() - start, 1)
    if as_json:
        print_json({"folder": str(folder), "checked": checked, "problems": problems, "seconds": seconds})
    else:
        for problem in problems:
            typer.echo(f"problem: {problem}")
        typer.echo(f"{folder}: {len(problems)} problems; checked: {checked}; {seconds} s")
    raise typer.Exit(1 if problems else 0)


@app.command("show")
def show_command(
    folder: Folder,
    tensor: Annotated[str | None, typer.Option(help="A HF name: print where its parts are.")] = None,
    as_json: Json = False,
) -> None:
    """Print what a folder of weights holds, without reading the weights."""
    if has_manifest(folder) and not (manifest := read_manifest(folder, complete=False)).complete:
        result = _head(manifest) | {"state": "writing", "written": len(recorded(folder)), "of": len(manifest.expected)}
    else:
        source = open_source(folder)
        if tensor is not None and tensor not in source.tensors:
            raise ConfigError(f"{folder}: holds no tensor {tensor!r}; expected a name as {next(iter(source.tensors))}")
        result = _contents(folder, source) if tensor is None else _places(source, tensor)
    if as_json:
        print_json(result)
        return
    files = result.pop("files", [])
    table(str(folder), ("", ""), [(key.replace("_", " "), str(value)) for key, value in result.items()])
    if files:
        table("files", tuple(files[0]), [tuple(map(str, file.values())) for file in files])


def _head(manifest: Any) -> dict[str, Any]:
    names = ("kind", "layout", "dtype", "facts")
    return {name: getattr(manifest, name) for name in names} | {"model": model_digest(manifest.model)[:12]}


def _contents(folder: Path, source: Source) -> dict[str, Any]:
    head = {"kind": "hf", "model": model_digest(source.inventory.model)[:12], "checksums": "none (no manifest.json)"}
    if has_manifest(folder):
        head = {**_head(read_manifest(folder)), "state": "complete"}
    model, sizes = source.inventory.model, {}
    for tensor in source.tensors.values():
        for part in tensor.parts:
            sizes[part.file] = sizes.get(part.file, 0) + 1
    return {
        **head,
        "layers": model.num_hidden_layers,
        "experts": model.n_routed_experts,
        "parameters": sum(parameter.count for parameter in source.inventory.parameters),
        "stored_in": _dtype_of(source),
        "tensors": len(source.tensors),
        "left_out": len(source.left_out),
        "files": [{"file": f, "parts": n, "bytes": (folder / f).stat().st_size} for f, n in sorted(sizes.items())],
    }


def _places(source: Source, name: str) -> dict[str, Any]:
    tensor = source.tensors[name]
    parts = [{"region": str(p.region), "file": p.file, "offset": p.offset} for p in tensor.parts]
    if tensor.scale:
        parts.append({"region": str(tensor.scale.region), "file": tensor.scale.file, "offset": tensor.scale.offset})
    return {"tensor": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "files": parts}
