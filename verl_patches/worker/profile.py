"""Traces of one profiled step of one rank: recipe.profile. Imported only in such a step.

For each phase that is asked for, in <run>/profile/:
    step_N_rank_R_PHASE.json.gz        Chrome's trace of torch.profiler (chrome://tracing, Perfetto)
    step_N_rank_R_PHASE/*_ascend_pt/   on npu instead: what torch_npu.profiler writes for MindStudio Insight, with
                                       ASCEND_PROFILER_OUTPUT/trace_view.json for Chrome
    step_N_rank_R_PHASE.memory.json    bytes of each memory group as the phase ends, by the ledger
    step_N_rank_R_PHASE.memory.pickle  on npu instead: the allocator's blocks and their history, for
                                       pytorch.org/memory_viz; not memory outside torch's pool (vLLM's sleep mode)
A phase that comes again in the step (a validation, the truth check) has _2, _3 behind its name. An error is reported,
not raised: other ranks would wait for this one in a collective.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl_patches.memory.ledger import Ledger
from verl_patches.platform import as_npu

log = logging.getLogger(__name__)
HISTORY_ENTRIES = 100_000  # of the allocator's last calls, each with its stack


class PhaseProfiler:
    """Profiles phases of `step` into `folder`; `begin` and `take` are called by worker/context.py."""

    def __init__(self, recipe: Any, step: int, rank: int, folder: Path, ledger: Ledger | None):
        self.phases, self.stacks, self.ledger = recipe.profile.phases, recipe.profile.stacks, ledger
        self.device = _Npu() if as_npu(recipe.platform) else None
        self.name, self.folder = f"step_{step}_rank_{rank}", folder
        self.files: list[str] = []
        self.faults: list[str] = []
        self._times: Counter[str] = Counter()
        self._finish: Callable[[], None] | None = None  # of the open trace

    def begin(self, phase: str | None) -> None:
        """End the open trace, and begin that of `phase` if it is wanted; None begins none."""
        finish, self._finish = self._finish, None
        if finish is not None:
            self._without_error(finish)
        if phase is not None and (self.phases is None or phase in self.phases):
            self._without_error(lambda: self._start(phase))

    def take(self) -> dict[str, list[str]]:
        """{files, faults}: what was written, relative to the folder, and what could not be; ends the open trace."""
        self.begin(None)
        return {"files": self.files, "faults": self.faults}

    def _start(self, phase: str) -> None:
        self._times[phase] += 1
        again = f"_{self._times[phase]}" if self._times[phase] > 1 else ""
        path = self.folder / f"{self.name}_{phase}{again}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.device is not None:
            stop = self.device.start(path, self.stacks)
        else:
            stop = _start(path, self.stacks, self.ledger)
        self._finish = lambda: self.files.extend(file.relative_to(self.folder).as_posix() for file in stop())

    def _without_error(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            log.warning("verl_patches: profile of %s", self.name, exc_info=True)
            self.faults.append(f"{self.name}: {type(error).__name__}: {error}")


def _start(path: Path, stacks: bool, ledger: Ledger | None) -> Callable[[], list[Path]]:
    """Start torch.profiler; the function that stops it returns the files that it wrote."""
    trace, memory = path.with_name(f"{path.name}.json.gz"), path.with_name(f"{path.name}.memory.json")
    profiler = torch.profiler.profile(record_shapes=stacks, with_stack=stacks)
    profiler.start()

    def stop() -> list[Path]:
        profiler.stop()
        profiler.export_chrome_trace(str(trace))
        if ledger is None:
            return [trace]
        memory.write_text(json.dumps({"bytes": ledger.held_bytes(), "measured": ledger.device_memory()}) + "\n")
        return [trace, memory]

    return stop


class _Npu:
    """torch_npu's profiler and allocator. Its methods print errors instead of raising them: the trace is looked for."""

    def __init__(self) -> None:
        import torch_npu

        self.profiler, self.memory = torch_npu.profiler, torch_npu.npu.memory

    def start(self, path: Path, stacks: bool) -> Callable[[], list[Path]]:
        """As `_start`, into folder `path`."""
        kind, memory = self.profiler.ProfilerActivity, path.with_name(f"{path.name}.memory.pickle")
        path.mkdir(parents=True, exist_ok=True)
        self.memory._record_memory_history(enabled="all", stacks="python", max_entries=HISTORY_ENTRIES)
        profiler = self.profiler.profile(
            activities=[kind.CPU, kind.NPU],
            on_trace_ready=self.profiler.tensorboard_trace_handler(str(path)),
            record_shapes=stacks,
            with_stack=stacks,
        )
        profiler.start()

        def stop() -> list[Path]:
            profiler.stop()
            # not _dump_snapshot, which starts a profiler of its own (torch_npu/npu/memory.py:858)
            memory.write_bytes(pickle.dumps(self.memory._snapshot()))
            self.memory._record_memory_history(enabled=None)
            traces = sorted(path.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))
            if not traces:
                raise RuntimeError(f"torch_npu.profiler wrote no trace to {path}; it prints why to the worker's log")
            return [*traces, memory]

        return stop
