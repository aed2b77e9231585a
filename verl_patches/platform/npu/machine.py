"""Describe the kinds of machines with NPUs, and find jemalloc and stale locks of compiled operators on a machine.

docs/line-a3.md has the kinds as a table, generated from HARDWARE, and the addresses of the sources. None of the
machines was tried.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30


@dataclass(frozen=True)
class Mc2Limits:
    """Describe what npu_moe_distribute_dispatch and npu_moe_distribute_combine (MC2) accept on a machine.

    ranks: sizes of a group. tokens, rank_experts: the most of a rank. hidden: sizes of a token's hidden state. top_k:
    the most experts of a token. experts: the most experts of a group; each rank has the same number.
    """

    ranks: tuple[int, ...]
    tokens: int
    rank_experts: int
    hidden: range
    top_k: int
    experts: int = 512

    @property
    def hidden_text(self) -> str:
        """Return the accepted hidden sizes in words."""
        most = str(self.hidden[-1])
        return most if len(self.hidden) == 1 else f"multiples of {self.hidden.step} up to {most}"


@dataclass(frozen=True)
class Hardware:
    """Describe one kind of machine.

    node_dies: devices of a node; module_dies: of each of its modules: a run on more than one uses the whole node.
    seen_bytes: bytes that a process sees of a die's 64 GiB. expansion_modes: values of HCCL_OP_EXPANSION_MODE that
    training may use (CANN 8.2.RC1, envref_07_0096). timed: whether a published run of this model states the time of a
    step.
    """

    title: str
    node_dies: int
    module_dies: int
    seen_bytes: int
    mc2: Mc2Limits
    expansion_modes: tuple[str, ...]
    timed: bool

    def usable_dies(self, dies: int) -> int:
        """Return `dies` if one module has so many, else all dies of a node; a run may use no other number of a node."""
        return dies if dies <= self.module_dies else self.node_dies


# op-plugin 7.1.0, docs/context/torch_npu-npu_moe_distribute_dispatch.md. CANN refuses the same (hicann/ops-transformer,
# mc2/moe_distribute_dispatch/op_host/op_tiling/moe_distribute_dispatch_tiling.cpp): on A3 "H only supports 7168"
_A3_MC2 = Mc2Limits((8, 16, 32, 64, 128, 144, 256, 288), 512, 512, range(7168, 7169), 8)
_A2_MC2 = Mc2Limits((16, 32, 64), 256, 24, range(32, 7169, 32), 16)
# sources of seen_bytes: sgl-project/sglang issue 29838 (A3), vllm-project/vllm-ascend issue 5020 (A2). AIV on A2 is
# for inference alone, and for one communicator; HCCL_INTRA_PCIE_ENABLE describes a Box16's modules (envref_07_0081)
HARDWARE = {
    "a3": Hardware("Atlas A3", 16, 16, int(61.27 * _GIB), _A3_MC2, ("AIV", "AI_CPU"), True),
    "800t_a2": Hardware("Atlas 800T A2", 8, 8, int(60.96 * _GIB), _A2_MC2, ("HOST",), False),
    "200t_a2_box16": Hardware("Atlas 200T A2 Box16", 16, 8, int(60.96 * _GIB), _A2_MC2, ("HOST",), False),
}
# folders of Ubuntu (libjemalloc2), of openEuler (jemalloc), and of jemalloc's own `make install`
JEMALLOC = ("/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/local/lib")
INSTALL_JEMALLOC = "apt install libjemalloc2 (Ubuntu) or yum install jemalloc (openEuler)"


def ld_preload(environ: Mapping[str, str]) -> str:
    """Return LD_PRELOAD for Ray and a run's processes: jemalloc, if this machine has it, before the present value."""
    present = environ.get("LD_PRELOAD", "")
    for folder in JEMALLOC if "jemalloc" not in present else ():
        library = Path(folder.format(machine=os.uname().machine), "libjemalloc.so.2")
        if library.exists():
            return f"{library}:{present}".rstrip(":")
    return present


def stale_locks(environ: Mapping[str, str]) -> list[Path]:
    """Return stale locks of torch's compiled extensions: later builds wait, but no process visible to us holds them.

    torch.utils.file_baton keeps a lock's file open while it compiles, and waits for other locks without a limit.
    """
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions")
    folder = Path(environ.get("TORCH_EXTENSIONS_DIR") or cache)
    locks = [lock.resolve() for lock in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")])]
    open_files = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with suppress(OSError):  # the process has ended, or is another user's
            open_files.add(os.readlink(descriptor))
    return [lock for lock in locks if str(lock) not in open_files and lock.exists()]


def start_notes(environ: Mapping[str, str], npu: bool) -> list[str]:
    """Return notes for the start of a run or its Ray: on locks that would stop it, and on a missing jemalloc."""
    notes = [
        f"stale lock of a compiled extension, which no visible process holds: rm {shlex.quote(str(lock))} "
        "(it blocks builds; keep it if another user, container or machine that shares the folder compiles)"
        for lock in stale_locks(environ)
    ]
    if npu and "jemalloc" not in ld_preload(environ):
        notes.append(f"libjemalloc.so.2 not found: freed host memory may stay with Ray's workers; {INSTALL_JEMALLOC}")
    return notes
