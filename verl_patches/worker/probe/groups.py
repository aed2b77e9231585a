"""Move known values over the process groups of a run's layouts, with the collective and the bytes of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_patches.layout.inventory import DTYPE_BYTES, build_inventory
from verl_patches.layout.sharding import static_bytes
from verl_patches.platform.npu import MC2_MIN_RANKS
from verl_patches.spec import RunSpec
from verl_patches.worker.memory import device_type
from verl_patches.worker.probe.operators import check_mc2, check_operators

OPERATORS, MC2 = "operators", "MC2"  # probes beside the kinds of groups
EXPERTS = "rollout experts"  # the groups over which MC2 exchanges tokens too
REPEATS = 5
_GRADIENT_BYTES = 160_000_000  # at most; a larger reduction moves its bytes no faster


class GroupKind(NamedTuple):
    """Describe the groups of ranks along an axis of a layout, and what a step moves over them.

    groups: lists of ranks. collective: all_reduce, all_to_all or send (to the next rank). size_bytes: of the tensor of
    a rank.
    """

    groups: list[list[int]]
    collective: str
    size_bytes: int


def group_kinds(run: RunSpec) -> dict[str, GroupKind]:
    """Return the kinds of groups that training and rollout communicate over, those of one rank left out."""
    train, size, hidden = run.train, DTYPE_BYTES[run.torch_dtype], run.model.hidden_size
    tokens = -(-run.longest_tokens // train.cp)  # of a longest sample on a rank
    routed, held = hidden * run.model.num_experts_per_tok, static_bytes(build_inventory(run.model), train, 0)
    gradients = min(_GRADIENT_BYTES, 4 * held.param_bytes // size)
    kinds = {
        "train tp": (train, "tp", "all_reduce", tokens * hidden * size),
        "train cp": (train, "cp", "all_reduce", tokens * hidden * size),
        "train pp": (train, "pp", "send", tokens * hidden * size // train.tp),
        "train experts": (train, "ep", "all_to_all", tokens * routed * size // train.tp),
        "train dp": (train, "dp-cp", "all_reduce", gradients),
        "train dp of experts": (train, "edp", "all_reduce", gradients),
        "train tp and pp": (train, "tp-pp", "all_reduce", 4),  # the norm of the gradient
    }
    if run.samples:
        rollout, options = run.rollout, run.verl.actor_rollout_ref.rollout
        kinds["rollout tp"] = (rollout, "tp", "all_reduce", options.max_num_batched_tokens * hidden * size)
        kinds["rollout dp"] = (rollout, "instance-dp", "all_reduce", 4)  # whether a rank has requests left
        if run.recipe.rollout.enable_expert_parallel:
            batch = -(-run.max_num_seqs // rollout.tp)
            kinds[EXPERTS] = (rollout, "instance", "all_to_all", batch * routed * size)
    made = {
        name: GroupKind(layout.groups(axis), collective, size_bytes)
        for name, (layout, axis, collective, size_bytes) in kinds.items()
    }
    return {name: kind for name, kind in made.items() if len(kind.groups[0]) > 1}


def group_probes(run: RunSpec) -> tuple[str, ...]:
    """Return what `measure` measures of the run's groups. The emulated device exchanges by MC2 among any ranks."""
    kinds = group_kinds(run)
    by_mc2 = run.as_npu and EXPERTS in kinds and (run.world_size >= MC2_MIN_RANKS or run.platform != "npu")
    return (*kinds, *([MC2] if by_mc2 else []))


def measure(run: RunSpec, what: str, compared: set[tuple[str, str]]) -> dict[str, Any]:
    """Return what this rank measures; all ranks of the run make this call.

    compared: operators and shapes of this process's earlier calls, which are left out; those of this call are added.
    OPERATORS, with any words behind it: {rows: one of `check_operators` for each}, on the first rank of a node.
    MC2: {rows}, of one row. A kind of groups: {ranks, bytes, seconds, wrong}: of this rank's group, the fastest of
    REPEATS calls, and what came out wrong, else "".
    """
    if what.startswith(OPERATORS):
        first = int(os.environ.get("RAY_LOCAL_RANK", 0)) == 0
        return {"rows": check_operators(run, compared) if first else []}
    kind = group_kinds(run)[EXPERTS if what == MC2 else what]
    made = [(ranks, dist.new_group(ranks)) for ranks in kind.groups]  # on all ranks in the same order
    ranks, group = next(each for each in made if dist.get_rank() in each[0])
    try:
        if what == MC2:
            return {"rows": [check_mc2(run, group)]}
        seconds, wrong = _COLLECTIVES[kind.collective](ranks, group, kind.size_bytes, device_type(run.platform))
    finally:
        dist.destroy_process_group(group)  # its buffers
    return {"ranks": ranks, "bytes": kind.size_bytes, "seconds": seconds, "wrong": wrong}


def _all_reduce(ranks: list[int], group: Any, size_bytes: int, device: str) -> tuple[float, str]:
    x, own = torch.empty(max(1, size_bytes // 4), device=device), float(dist.get_rank() + 1)
    seconds = _fastest(lambda: x.fill_(own), lambda: dist.all_reduce(x, group=group), device)
    return seconds, _difference(x, torch.full_like(x, sum(rank + 1.0 for rank in ranks)))


def _all_to_all(ranks: list[int], group: Any, size_bytes: int, device: str) -> tuple[float, str]:
    own, each, all_ranks = dist.get_rank(), max(1, size_bytes // 4 // len(ranks)), torch.tensor(ranks, device=device)
    sent = (own * dist.get_world_size() + all_ranks).float().repeat_interleave(each)
    got = torch.empty_like(sent)
    seconds = _fastest(lambda: got.zero_(), lambda: dist.all_to_all_single(got, sent, group=group), device)
    return seconds, _difference(got, (all_ranks * dist.get_world_size() + own).float().repeat_interleave(each))


def _send(ranks: list[int], group: Any, size_bytes: int, device: str) -> tuple[float, str]:
    at = ranks.index(dist.get_rank())
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    sent = torch.full((max(1, size_bytes // 4),), float(ranks[at]), device=device)
    got = torch.empty_like(sent)

    def exchange() -> None:
        pair = dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, got, before, group)
        for each in dist.batch_isend_irecv([*pair]):
            each.wait()

    return _fastest(lambda: got.fill_(-1.0), exchange, device), _difference(got, torch.full_like(got, float(before)))


_COLLECTIVES = {"all_reduce": _all_reduce, "all_to_all": _all_to_all, "send": _send}


def _fastest(prepare: Callable[[], Any], call: Callable[[], Any], device: str) -> float:
    """Return the seconds of the fastest of REPEATS calls, after one that makes the communicator."""
    found = []
    wait = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    for _ in range(REPEATS + 1):
        prepare()
        wait()
        dist.barrier()
        start = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = int((found != expected).sum())
    if not wrong:
        return ""
    at = int((found != expected).nonzero()[0])
    return f"{wrong} of {found.numel()} values, at {at} expected {expected[at].item():g}, found {found[at].item():g}"
