"""Modelled seconds from a run's launch to the end of step 1, by the phases of `start` in summary.json. No torch.

Cold: no file is in the page cache of a node; warm: all are. Phases follow each other, all workers do a phase at once:

controller   driver and controller, which imports verl too (docs: not in summary.json)
worker 0     verl starts it alone, for its address (verl/single_controller/ray/base.py:297; not in summary.json)
imports      of the other workers, as `start.imports`
groups       rendezvous of all ranks, as `start.groups`; a communicator is made by its group's first collective
models       as `start.models`: weights, host copies, engine, its communicators and graphs
step 1       training's communicators and the step, as `seconds.step` of the first one
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from omegaconf import DictConfig

from verl_patches.config import hccl
from verl_patches.config.checks import GRAPH_MINUTES
from verl_patches.config.compose import graph_arguments, hf_config_of, model_shape_of, reads_weights
from verl_patches.layout.model_folder import QUANTIZATION
from verl_patches.layout.parallel import train_layout_of
from verl_patches.layout.phases import samples
from verl_patches.planning.step_model import stage_elements

IMPORTS_S, FILES = 13.0, 10_027  # CPU seconds and files of a worker's imports: tests/benchmarks/start.py
COPY_BYTES_PER_S = 1.5e9  # of a process, from the page cache: a plain copy of docs/weights.md
# All assumed. A communicator: 2 to 6 s are reported of NCCL (NVIDIA/nccl issue 534), 33 s of HCCL on 16 dies of 910B
# (feifeibear/long-context-attention issue 174).
COMMUNICATOR_S, COLD_FILE_S, RENDEZVOUS_S, ENGINE_S, PINNED_BYTES_PER_S = 3.0, 0.001, 5.0, 30.0, 2e9


def start_plan(config: DictConfig, step_s: float, pinned_bytes: int, read_gb_s: float) -> dict[str, Any]:
    """{phases: [{phase, part, cold_s, warm_s, of}], cold_s, warm_s} of a start, as JSON-ready data.

    step_s: of a step. pinned_bytes: of a node's workers. read_gb_s: of all nodes together from the file system with the
    weights, GB/s. FP8 is taken where the model's config.json says so.
    """
    train, model = train_layout_of(config), model_shape_of(config)
    made = Counter(group.side for group in hccl.groups(config) if group.communicates)
    cold, imports = (
        FILES * COLD_FILE_S,
        f"{IMPORTS_S:g} CPU s and {FILES} files, measured; a cold file {COLD_FILE_S:g} s",
    )
    rows = [(phase, "imports", IMPORTS_S + cold, IMPORTS_S, imports) for phase in ("controller", "worker 0", "imports")]
    rows.append(("groups", "rendezvous", RENDEZVOUS_S, RENDEZVOUS_S, "assumed"))
    if reads_weights(config):
        size = 1 if QUANTIZATION in hf_config_of(config) else 2
        of_ranks = [size * sum(stage_elements(model, train, stage, "mindspeed")) for stage in range(train.pp)]
        total, warm = sum(of_ranks) * train.world_size / train.pp, max(of_ranks) / COPY_BYTES_PER_S
        read = f"{total / 1e12:.2f} TB over {read_gb_s:g} GB/s; cached, {COPY_BYTES_PER_S / 1e9:g} GB/s a process"
        rows.append(("models", "weights", max(total / (read_gb_s * 1e9), warm), warm, read))
    pinned = pinned_bytes / config.trainer.n_gpus_per_node / PINNED_BYTES_PER_S
    copies = f"{pinned_bytes / 1e9:.0f} GB a node, {PINNED_BYTES_PER_S / 1e9:g} GB/s a process (assumed)"
    rows.append(("models", "host memory pinned", pinned, pinned, copies))
    said = f"communicators of rank 0, {COMMUNICATOR_S:g} s each (assumed; one report says 33)"
    if samples(config.recipe):
        rows.append(("models", "engine", ENGINE_S, ENGINE_S, "assumed"))
        seconds = made["rollout"] * COMMUNICATOR_S
        rows.append(("models", "communicators", seconds, seconds, f"{made['rollout']} {said}"))
        graphs = len(graph_arguments(config).get("graph_batch_sizes") or ())
        seconds = graphs * 60 * sum(GRAPH_MINUTES) / 2
        rows.append(
            ("models", "graphs", seconds, seconds, f"{graphs}, {GRAPH_MINUTES[0]} to {GRAPH_MINUTES[1]} minutes each")
        )
    seconds = made["train"] * COMMUNICATOR_S
    rows += [("step 1", "communicators", seconds, seconds, f"{made['train']} {said}")]
    rows += [("step 1", "step", step_s, step_s, "as any other")]
    phases = [
        {"phase": phase, "part": part, "cold_s": round(cold, 1), "warm_s": round(warm, 1), "of": of}
        for phase, part, cold, warm, of in rows
    ]
    totals = {name: round(sum(row[name] for row in phases), 1) for name in ("cold_s", "warm_s")}
    return {"modelled": True, "phases": phases, **totals}
