"""Trace the phases of one profiled step on one rank (recipe.profile); imported only in such a step.

For each phase that the recipe asks for, these files are written to <run>/profile/:
    step_N_rank_R_PHASE.json.gz        Chrome's trace of torch.profiler (chrome://tracing, Perfetto)
    step_N_rank_R_PHASE/*_ascend_pt/   on npu instead: what torch_npu.profiler writes for MindStudio Insight, with
                                       ASCEND_PROFILER_OUTPUT/trace_view.json for Chrome
    step_N_rank_R_PHASE.memory.pickle  on npu: the allocator's blocks after the phase's work and before its moves, and
                                       their history, for pytorch.org/memory_viz; not memory outside torch's pool
A phase that occurs again in the step (a validation, the truth check) gets the suffix _2, _3. An error is reported,
not raised, as other ranks would wait for this one in a collective.
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import PROFILE
from verl_patches.platform import as_npu

log = logging.getLogger(__name__)
HISTORY_ENTRIES = 100_000  # the allocator's last calls, each with its stack


class PhaseProfiler:
    """Profile phases of `step` into `folder`; worker/context.py calls `snapshot`, `begin`, the worker `take_files`."""

    def __init__(self, recipe: Any, step: int, rank: int, folder: Path):
        self.phases, self.on_npu, stacks = recipe.profile.phases, as_npu(recipe.platform), recipe.profile.stacks
        self.options = {"record_shapes": stacks, "with_stack": stacks}
        self.name, self.folder = f"step_{step}_rank_{rank}", folder
        self.files: list[str] = []
        self.faults: list[str] = []
        self._phase_counts: Counter[str] = Counter()
        self._profiler: Any = None  # that of the open trace, of torch or torch_npu
        self._path, self._memory = folder, None

    def snapshot(self) -> None:
        """Take the allocator's snapshot of the open trace, on npu."""
        if self._profiler is not None and self.on_npu:
            self._record_error(self._take_snapshot)

    def begin(self, phase: str | None) -> None:
        """End the open trace, and begin that of `phase` if the recipe asks for it; None begins none."""
        if self._profiler is not None:
            # on npu the trace is analysed now, which may take minutes
            heartbeat.current_heartbeat().begin_phase(PROFILE)
            self._record_error(self._stop_npu if self.on_npu else self._stop)
            self._profiler = None
        if phase is not None and (self.phases is None or phase in self.phases):
            self._record_error(lambda: self._start(phase))

    def take_files(self) -> dict[str, list[str]]:
        """End the open trace; return {files, faults}: paths relative to the folder, and errors of files not written."""
        self.snapshot()
        self.begin(None)
        return {"files": self.files, "faults": self.faults}

    def _start(self, phase: str) -> None:
        self._phase_counts[phase] += 1
        again = f"_{self._phase_counts[phase]}" if self._phase_counts[phase] > 1 else ""
        self._path = self.folder / f"{self.name}_{phase}{again}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.on_npu:
            import torch_npu

            self._path.mkdir(exist_ok=True)
            torch_npu.npu.memory._record_memory_history(enabled="all", stacks="python", max_entries=HISTORY_ENTRIES)
            kind, handler = torch_npu.profiler.ProfilerActivity, torch_npu.profiler.tensorboard_trace_handler
            ready = handler(str(self._path))
            profiler = torch_npu.profiler.profile(activities=[kind.CPU, kind.NPU], on_trace_ready=ready, **self.options)
        else:
            profiler = torch.profiler.profile(**self.options)
        profiler.start()
        self._profiler = profiler

    def _stop(self) -> None:
        self._profiler.stop()
        trace = self._path.with_name(f"{self._path.name}.json.gz")
        self._profiler.export_chrome_trace(str(trace))
        self._add_files([trace])

    def _take_snapshot(self) -> None:
        import torch_npu

        # not torch_npu.npu.memory._dump_snapshot, which starts its own profiler
        self._memory = torch_npu.npu.memory._snapshot()

    def _stop_npu(self) -> None:
        """Stop the profiler and the allocator's history; torch_npu prints errors, so look for the files."""
        import torch_npu

        memory, self._memory = self._memory, None
        try:
            self._profiler.stop()
        finally:
            torch_npu.npu.memory._record_memory_history(enabled=None)  # else every later allocation records a stack
        traces = sorted(self._path.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))
        if not traces:
            raise RuntimeError(f"torch_npu.profiler wrote no trace to {self._path}; see the worker's log")
        if memory is not None:  # its snapshot did not fail
            traces.append(self._path.with_name(f"{self._path.name}.memory.pickle"))
            traces[-1].write_bytes(pickle.dumps(memory))
        self._add_files(traces)

    def _add_files(self, files: list[Path]) -> None:
        self.files += [file.relative_to(self.folder).as_posix() for file in files]

    def _record_error(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            log.warning("verl_patches: the profile of %s failed; training continues", self.name, exc_info=True)
            self.faults.append(f"{self.name}: {type(error).__name__}: {error}")
