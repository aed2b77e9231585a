"""Modelled seconds from a run's launch to the end of step 1, by the phases of `start` in summary.json. No torch.

Cold: no file is in the page cache of a node; warm: all are. Phases follow each other, all workers do a phase at once.
Not in summary.json: the controller, which imports verl too, and worker 0, which verl starts alone, for its address
(verl/single_controller/ray/base.py:362). A communicator is made by its group's first collective.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl_patches.batches.checks import GRAPH_MINUTES
from verl_patches.config import hccl
from verl_patches.layout.model_folder import QUANTIZATION, read_json_object
from verl_patches.planning.step_model import stage_elements
from verl_patches.spec import RunSpec

IMPORTS_S, FILES = 13.0, 10_027  # CPU seconds and files of a worker's imports: tests/benchmarks/start.py
COPY_BYTES_PER_S = 1.5e9  # of a process, from the page cache: a plain copy of docs/weights.md
# All assumed. A communicator: 2 to 6 s are reported of NCCL (NVIDIA/nccl issue 534), 33 s of HCCL on 16 dies of 910B
# (feifeibear/long-context-attention issue 174).
COMMUNICATOR_S, COLD_FILE_S, RENDEZVOUS_S, ENGINE_S, PINNED_BYTES_PER_S = 3.0, 0.001, 5.0, 30.0, 2e9


def start_plan(run: RunSpec, step_s: float, pinned_bytes: int, read_gb_s: float) -> dict[str, Any]:
    """{phases: [{phase, part, cold_s, warm_s, of}], cold_s, warm_s} of a start, as JSON-ready data.

    step_s: of a step. pinned_bytes: of a node's workers. read_gb_s: of all nodes together from the file system with the
    weights, GB/s. FP8 is taken where the model's config.json is here and says so.
    """
    rows: list[dict[str, Any]] = []

    def add(phase: str, part: str, warm_s: float, of: str, cold_s: float | None = None) -> None:
        cold_s = warm_s if cold_s is None else cold_s
        rows.append({"phase": phase, "part": part, "cold_s": round(cold_s, 1), "warm_s": round(warm_s, 1), "of": of})

    made = Counter(group.side for group in hccl.groups(run) if group.communicates)
    each = f"communicators of rank 0, {COMMUNICATOR_S:g} s each (assumed; one report says 33)"
    files = f"{IMPORTS_S:g} CPU s, {FILES} files (measured); a cold file {1000 * COLD_FILE_S:g} ms (assumed)"
    for phase in ("controller", "worker 0", "imports"):
        add(phase, "imports", IMPORTS_S, files, IMPORTS_S + FILES * COLD_FILE_S)
    add("groups", "rendezvous", RENDEZVOUS_S, "assumed")
    if run.reads_weights:
        train, model, file = run.train, run.model, run.model_folder / "config.json"
        size = 1 if file.exists() and QUANTIZATION in read_json_object(file) else 2  # hf_config is as training reads it
        of_stages = [size * sum(stage_elements(model, train, stage, "mindspeed")) for stage in range(train.pp)]
        total, warm_s = sum(of_stages) * train.world_size / train.pp, max(of_stages) / COPY_BYTES_PER_S
        rates = f"{total / 1e12:.2f} TB, {read_gb_s:g} GB/s (--read-gb-s); cached {COPY_BYTES_PER_S / 1e9:g} a process"
        add("models", "weights", warm_s, rates, max(total / read_gb_s / 1e9, warm_s))
    copies = f"{pinned_bytes / 1e9:.0f} GB a node, {PINNED_BYTES_PER_S / 1e9:g} GB/s a process (assumed)"
    add("models", "host copies", pinned_bytes / run.verl.trainer.n_gpus_per_node / PINNED_BYTES_PER_S, copies)
    if run.samples:
        graphs = len(run.graph_sizes)
        minutes = "{} of {} to {} minutes (vllm-ascend's own message)".format(graphs, *GRAPH_MINUTES)
        add("models", "engine", ENGINE_S, "assumed")
        add("models", "communicators", made["rollout"] * COMMUNICATOR_S, f"{made['rollout']} {each}")
        add("models", "graphs", graphs * 30 * sum(GRAPH_MINUTES), minutes)
    add("step 1", "communicators", made["train"] * COMMUNICATOR_S, f"{made['train']} {each}")
    add("step 1", "step", step_s, "as any other")
    totals = {column: round(sum(row[column] for row in rows), 1) for column in ("cold_s", "warm_s")}
    return {"modelled": True, "phases": rows, **totals}
