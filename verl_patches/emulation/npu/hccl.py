"""Emulate HCCL with gloo: a backend of this name, its groups by name, and MC2's demands on a group.

MC2 is CANN's pair of ops that dispatch tokens to the ranks of their experts and combine the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


class GraphState:
    """Hold whether a compiled graph is running in this process."""

    running = False


class ProcessGroupHCCL(dist.ProcessGroupGloo):
    """Extend a gloo group by a name, as HCCL's groups have: MC2's ops take a group by name."""

    class Options:
        """Hold a group's options; only hccl_config is read, and it raises ValueError where torch_npu's would refuse."""

        hccl_config: Mapping[str, int | str] = {}

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "hccl_config":
                _check_config(value)
            super().__setattr__(name, value)

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, options: Options | None = None, ranks: Any = ()):
        super().__init__(store, rank, size, timeout)
        self.config = dict(options.hccl_config) if options is not None else {}
        self.name, self.ranks = f"hccl_group_{len(_GROUPS)}", list(ranks) or list(range(size))
        self.last_dispatch: Any = None  # expert_ops.Dispatch of the last MC2 dispatch, which its combine needs
        self.mc2_exchanges = 0
        self.mc2_in_graphs: bool | None = None  # None: MC2 has not used the group yet

    def mc2_all_to_all(self, out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]) -> None:
        """Run one all-to-all of MC2 and count it, so that other collectives on the group are detected."""
        self.mc2_exchanges += 1
        self.alltoall_base(out, rows, received, sent).wait()

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """Return the group's name; `rank` is the caller's, in the group (vllm-ascend) or global (MindSpeed)."""
        own = [self.rank()]
        if dist.is_initialized():
            own.append(dist.get_rank())
        if rank not in own:
            raise ValueError(f"get_hccl_comm_name({rank}) of {self.name}: expected this process's own rank, {own}")
        return self.name


_GROUPS: dict[str, ProcessGroupHCCL] = {}  # pybind returns our class only while Python holds the group


# Types of the values, as the messages of torch_npu 2.5.1.post1's libtorch_npu.so name them.
_CONFIG_TYPES = {
    "hccl_buffer_size": int,
    "group_name": str,
    "qos_traffic_class": int,
    "qos_service_level": int,
    "hccl_op_expansion_mode": int,
}


def _check_config(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if type(value) is not _CONFIG_TYPES.get(name):
            expected = ", ".join(f"{key} ({kind.__name__})" for key, kind in _CONFIG_TYPES.items())
            raise ValueError(f"hccl_config holds {name}={value!r}; expected {expected}")


def create_group(
    store: Any, rank: int, size: int, timeout: Any, options: Any = None, ranks: Any = ()
) -> ProcessGroupHCCL:
    """Make a group of this process, which `mc2_group` can find; `ranks` are global ranks, for messages."""
    group = ProcessGroupHCCL(store, rank, size, timeout, options, ranks)
    _GROUPS[group.name] = group
    return group


def create_group_by_options(given: Any, options: Any) -> ProcessGroupHCCL:
    """Make a group from register_backend's extended arguments, with which torch_npu registers hccl too."""
    ranks = given.global_ranks_in_group
    return create_group(given.store, given.group_rank, given.group_size, given.timeout, options, ranks)


def group_configs() -> list[dict[str, Any]]:
    """Return {ranks: number, config: its hccl_config} of each group of this process, in the order of creation."""
    return [{"ranks": group.size(), "config": group.config} for group in _GROUPS.values()]


def mc2_group(name: str) -> ProcessGroupHCCL:
    """Return the group of this name for a call of MC2; raise ValueError if it is unknown or MC2 may not use it.

    No other operator may run on MC2's communicator (CANN, aclnnMoeDistributeDispatch, constraints of communication
    domains); calls in graphs and eager calls on one communicator are not supported (HCCL user guide, management of
    communication domains). The second is checked for MC2's groups only: upstream's TP groups have both
    (docs/line-a3.md). Other collectives are detected at MC2's next call, by gloo's count of a group's collectives.
    """
    if name not in _GROUPS:
        raise ValueError(f"expected an HCCL group of this process ({', '.join(_GROUPS) or 'none'}), found {name!r}")
    group = _GROUPS[name]
    where = f"{name} of ranks {group.ranks}"
    others = group._get_sequence_number_for_group() - group.mc2_exchanges
    if others:
        raise ValueError(f"{others} collective(s) that are not MC2's ran on {where}: MC2 needs a group of its own")
    if group.mc2_in_graphs not in (None, GraphState.running):
        modes = ("in a graph", "eagerly") if group.mc2_in_graphs else ("eagerly", "in a graph")
        raise ValueError("MC2 ran {} before and {} now on {}: HCCL supports one of the two".format(*modes, where))
    group.mc2_in_graphs = GraphState.running
    return group


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], group: ProcessGroupHCCL, equal_number: tuple[str, int] = ("", 0)
) -> tuple[torch.Tensor, list[int]]:
    """Send the first sent[0] rows to rank 0 and so on; return (rows received, how many from each rank).

    equal_number: name and value of a number that must be equal on all ranks; else every rank raises ValueError.
    """
    counts = torch.tensor([(count, equal_number[1]) for count in sent], dtype=torch.int64)
    counts_in = torch.empty_like(counts)
    ones = [1] * len(sent)
    group.mc2_all_to_all(counts_in, counts, ones, ones)
    received, values = counts_in.T.tolist()
    if set(values) != {equal_number[1]}:
        raise ValueError(f"{equal_number[0]} must be equal on all ranks of the group, found {values}")
    out = rows.new_empty(sum(received), *rows.shape[1:])
    group.mc2_all_to_all(out, rows.contiguous(), received, list(sent))
    return out, received
