"""Trace the phases of one profiled step on one rank (recipe.profile); imported only in such a step.

For each phase that the recipe asks for, these files are written to <run>/profile/:
    step_N_rank_R_PHASE.json.gz        Chrome's trace of torch.profiler (chrome://tracing, Perfetto)
    step_N_rank_R_PHASE/*_ascend_pt/   on npu instead: what torch_npu.profiler writes for MindStudio Insight, with
                                       ASCEND_PROFILER_OUTPUT/trace_view.json for Chrome
    step_N_rank_R_PHASE.memory.json    bytes of each memory group after the phase's work and before its moves, by the
                                       ledger
    step_N_rank_R_PHASE.memory.pickle  on npu instead: the allocator's blocks and their history, for
                                       pytorch.org/memory_viz; not memory outside torch's pool (vLLM's sleep mode)
A phase that occurs again in the step (a validation, the truth check) gets the suffix _2, _3. An error is reported,
not raised, as other ranks would wait for this one in a collective.
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

from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import PROFILE
from verl_patches.memory.ledger import Ledger
from verl_patches.platform import as_npu

log = logging.getLogger(__name__)
HISTORY_ENTRIES = 100_000  # the allocator's last calls, each with its stack


class PhaseProfiler:
    """Profile phases of `step` into `folder`; worker/context.py calls `snapshot`, `begin`, the worker `take_files`."""

    def __init__(self, recipe: Any, step: int, rank: int, folder: Path, ledger: Ledger | None):
        self.phases, self.stacks, self.ledger = recipe.profile.phases, recipe.profile.stacks, ledger
        self.on_npu = as_npu(recipe.platform)
        self.name, self.folder = f"step_{step}_rank_{rank}", folder
        self.files: list[str] = []
        self.faults: list[str] = []
        self._phase_counts: Counter[str] = Counter()
        self._trace: _Trace | _NpuTrace | None = None  # the open trace

    def snapshot(self) -> None:
        """Take the memory snapshot of the open trace."""
        if self._trace is not None:
            self._record_error(self._trace.snapshot)

    def begin(self, phase: str | None) -> None:
        """End the open trace, and begin that of `phase` if the recipe asks for it; None begins none."""
        trace, self._trace = self._trace, None
        if trace is not None:
            heartbeat.current_heartbeat().begin_phase(
                PROFILE
            )  # on npu the trace is analysed now, which may take minutes
            self._record_error(lambda: self._add_files(trace.stop()))
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
        path = self.folder / f"{self.name}_{phase}{again}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._trace = (_NpuTrace if self.on_npu else _Trace)(path, self.stacks, self.ledger)

    def _add_files(self, files: list[Path]) -> None:
        self.files += [file.relative_to(self.folder).as_posix() for file in files]

    def _record_error(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            log.warning("verl_patches: the profile of %s failed; training continues", self.name, exc_info=True)
            self.faults.append(f"{self.name}: {type(error).__name__}: {error}")


class _Trace:
    """Trace with torch.profiler, and read the ledger's bytes; `stop` writes both and returns the files."""

    def __init__(self, path: Path, stacks: bool, ledger: Ledger | None):
        self.path, self.ledger = path, ledger
        self.memory: dict[str, Any] | None = None
        self.profiler = torch.profiler.profile(record_shapes=stacks, with_stack=stacks)
        self.profiler.start()

    def snapshot(self) -> None:
        if self.ledger is not None:
            self.memory = {"bytes": self.ledger.held_bytes(), "measured": self.ledger.device_memory()}

    def stop(self) -> list[Path]:
        trace, memory = (self.path.with_name(f"{self.path.name}.{end}") for end in ("json.gz", "memory.json"))
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(trace))
        if self.memory is None:
            return [trace]
        memory.write_text(json.dumps(self.memory) + "\n")
        return [trace, memory]


class _NpuTrace:
    """Trace with torch_npu's profiler and allocator; they print errors, so `stop` looks for the files."""

    def __init__(self, path: Path, stacks: bool, ledger: Ledger | None):
        import torch_npu

        self.path, self.memory, self.allocator = path, None, torch_npu.npu.memory
        path.mkdir(parents=True, exist_ok=True)
        self.allocator._record_memory_history(enabled="all", stacks="python", max_entries=HISTORY_ENTRIES)
        kind = torch_npu.profiler.ProfilerActivity
        self.profiler = torch_npu.profiler.profile(
            activities=[kind.CPU, kind.NPU],
            on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(str(path)),
            record_shapes=stacks,
            with_stack=stacks,
        )
        self.profiler.start()

    def snapshot(self) -> None:
        # not torch_npu.npu.memory._dump_snapshot, which starts its own profiler
        self.memory = self.allocator._snapshot()

    def stop(self) -> list[Path]:
        try:
            self.profiler.stop()
            files = list[Path]()
            if self.memory is not None:
                files.append(self.path.with_name(f"{self.path.name}.memory.pickle"))
                files[0].write_bytes(pickle.dumps(self.memory))
        finally:
            self.allocator._record_memory_history(enabled=None)  # else every later allocation records a stack
        traces = sorted(self.path.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))
        if not traces:
            raise RuntimeError(f"torch_npu.profiler wrote no trace to {self.path}; see the worker's log")
        return [*traces, *files]
