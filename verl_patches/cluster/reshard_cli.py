"""The command `reshard-plan`: the plan of a weight sync between two layouts: figures, picture, path of a parameter."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.cluster.compose import CONFIGS_DIR
from verl_patches.cluster.show import Json, table
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.reshard.check import check_plan
from verl_patches.reshard.figures import figures, path_of
from verl_patches.reshard.plan import DEFAULT_BUCKET_BYTES, plan_reshard

GB = 1e9
TRAIN_LIBRARIES, ROLLOUT_LIBRARIES = ("mindspeed", "megatron-local", "megatron-te"), ("vllm-ascend", "vllm")
DEFAULT_MODEL = CONFIGS_DIR / "model" / "deepseekv3_671b.json"
TRAIN_HELP = 'Training layout, such as "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7".'
ROLLOUT_HELP = 'Rollout layout, such as "tp2 ep128 etp1 @256": 2 instances of 128 ranks.'


def register(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""

    @app.command("reshard-plan")
    def reshard_plan_command(
        train: Annotated[str, typer.Option(help=TRAIN_HELP)],
        rollout: Annotated[str, typer.Option(help=ROLLOUT_HELP)],
        model: Annotated[Path, typer.Option(help="An HF config.json.", show_default="DeepSeek-V3")] = DEFAULT_MODEL,
        train_library: Annotated[str, typer.Option(help="How training cuts: mindspeed, megatron-te ...")] = "mindspeed",
        rollout_library: Annotated[str, typer.Option(help="How rollout cuts: vllm or vllm-ascend.")] = "vllm-ascend",
        bucket_bytes: Annotated[
            int, typer.Option(help="Most that a rank sends, and receives, in one collective.")
        ] = DEFAULT_BUCKET_BYTES,
        png: Annotated[Path | None, typer.Option(help="Draw who sends what to whom into this file.")] = None,
        param: Annotated[str | None, typer.Option(help="An HF tensor: tell its path to --rank.")] = None,
        rank: Annotated[int | None, typer.Option(help="The rank for --param.")] = None,
        as_json: Json = False,
    ) -> None:
        """Plan the weight sync between two layouts, prove it, and tell what it costs."""
        if (param is None) != (rank is None):
            raise ConfigError("reshard-plan: --param and --rank go together: name one HF tensor and one rank")
        if param is not None and png is not None:
            raise ConfigError("reshard-plan: --png draws the plan, --param tells one tensor's path: give one of them")
        start = time.perf_counter()
        layouts = _layout("--train", train), _layout("--rollout", rollout)
        _check_library("--train-library", train_library, TRAIN_LIBRARIES)
        _check_library("--rollout-library", rollout_library, ROLLOUT_LIBRARIES)
        if rank is not None and not 0 <= rank < layouts[0].world_size:
            raise ConfigError(f"reshard-plan: --rank {rank}: expected 0 to {layouts[0].world_size - 1}")
        plan = plan_reshard(build_inventory(model), *layouts, train_library=train_library,
                            rollout_library=rollout_library, bucket_bytes=bucket_bytes)
        seconds = time.perf_counter() - start
        if param is not None:
            told = path_of(plan, param, rank)
            typer.echo(json.dumps(told, indent=1)) if as_json else _show_path(told)
            return
        check_plan(plan)
        if png is not None:
            from verl_patches.evaluation.plots import draw_plan

            draw_plan(plan, png)
        told = {**figures(plan), "proven": True, "planning_s": round(seconds, 2), "png": png and str(png)}
        typer.echo(json.dumps(told, indent=1)) if as_json else _show(told)


def _layout(option: str, text: str) -> ParallelLayout:
    try:
        return parse_layout(text)
    except ConfigError as error:
        raise ConfigError(f'reshard-plan: {option} "{text}": {error} (etp left out is tp)') from error


def _check_library(option: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise ConfigError(f"reshard-plan: {option} {found}: expected one of {', '.join(allowed)}")


def _show(told: dict[str, Any]) -> None:
    table(f"{told['train']} ({told['train_library']}) to {told['rollout']} ({told['rollout_library']})",
          ("stage", "ranks", "layers", "sends, GB a rank", "max / mean", "receives, GB a rank"),
          [(str(s["stage"]), str(s["ranks"]), str(s["layers"]), _gb(s["sent_bytes"]), f"{s['imbalance']:.3f}",
            _gb(s["received_bytes"])) for s in told["stages"]])
    near = told["nearness_bytes"]
    total = sum(near.values()) or 1
    lines = [
        ("must arrive, GB a rank", _gb(told["must_arrive_bytes"]), ""),
        ("received / bound", f"{told['received_over_bound']:.4f}", "1"),
        ("kept on the rank, GB", _gb(told["kept_bytes"]), ""),
        ("sent, max / mean over all ranks", f"{told['imbalance']:.3f}", f"{told['imbalance_bound']:.3f}"),
        ("collectives", str(told["collectives"]), str(told["collectives_bound"])),
        ("peak extra bytes (4 wire buffers), GB", f"{told['peak_extra_bytes'] / GB:.2f}",
         f"at most {4 * told['bucket_bytes'] / GB:.2f}"),
        ("from the same card, node, across", ", ".join(f"{100 * n / total:.1f}%" for n in near.values()), ""),
        ("planning, s", str(told["planning_s"]), ""),
        ("digest", told["digest"][:16], ""),
    ]
    table("whole sync", ("figure", "value", "bound"), lines)
    typer.echo("proven: every rollout element is written exactly once, from the training element it belongs to")
    if told["png"]:
        typer.echo(f"picture: {told['png']}")


def _gb(spread: dict[str, float]) -> str:
    low, mean, high = (f"{spread[key] / GB:.2f}" for key in ("min", "mean", "max"))
    return mean if low == high else f"{mean} ({low} to {high})"


def _show_path(told: dict[str, Any]) -> None:
    typer.echo(f"{told['parameter']} {told['shape']} {told['dtype']}")
    typer.echo(f"rank {told['rank']} holds in training: {told['holds_in_training'] or 'nothing'}")
    typer.echo(f"rank {told['rank']} needs in rollout: {told['needs_in_rollout'] or 'nothing'}")
    table("who has it", ("region", "held in training by ranks", "needed in rollout by"),
          [(h["region"], _few(h["holders"]), f"{h['needed_by']} ranks") for h in told["holders"]])
    table(f"what rank {told['rank']} does with it", ("region", "what", "peer", "its stage", "where", "bucket", "bytes"),
          [(s["region"], s["what"], str(s["peer"]), str(s["stage"]), s["nearness"],
            "" if s["bucket"] is None else str(s["bucket"]), f"{s['bytes']:,}") for s in told["steps"]])


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 12 else f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
