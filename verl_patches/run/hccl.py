"""Derive and check the settings of Ascend's collectives (HCCL): buffer size, timeouts, ports of each node.

These were not tried on a device: the figures are from the documentation of CANN and torch_npu at the pins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from verl_patches.errors import Check, ConfigError, either
from verl_patches.layout.inventory import ModelShape
from verl_patches.platform.npu import MC2_MIN_RANKS
from verl_patches.platform.npu.groups import ROLLOUT_EXPERT_GROUP, TRAINING_EXPERT_GROUPS
from verl_patches.platform.npu.machine import HARDWARE, Mc2Limits
from verl_patches.recipe import HCCL_PORTS
from verl_patches.run.ray_nodes import RayPorts
from verl_patches.spec import RunSpec

DEFAULT_BUFFER_MIB = 200  # HCCL's default
BUFFER_STEP_MIB = 100  # a size that follows from the need is a multiple of it
BUFFERS_PER_GROUP = 2  # "each communicator occupies 2 x HCCL_BUFFSIZE" (CANN, HCCL_BUFFSIZE)
AIV_EXEC_TIMEOUT_S = 1091  # CANN envref_07_0078: the longest with AIV
WATCHDOG_MARGIN_S = 60  # HCCL has to time out before the watchdog of torch_npu's ProcessGroupHCCL ends the process
IF_BASE_PORT, HOST_PORTS = "HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE"
IF_PORTS = 32  # ports from HCCL_IF_BASE_PORT on that HCCL uses (CANN envref_07_0074: 32 in 8.5, 16 in 8.0)
_WITHOUT_MC2_TEXT = (
    "set recipe.rollout.enable_expert_parallel=false, recipe.rollout.data_parallel_size=1 and "
    "recipe.rollout.instances=null, with TP > 1 also recipe.rollout.ascend.multistream_moe=false, as vllm-ascend has "
    f"no other exchange in decode from {MC2_MIN_RANKS} ranks of a run on"
)
PROC = Path("/proc/sys/net/ipv4")
_MIB = 1 << 20


def hccl_checks(run: RunSpec) -> Iterator[Check]:
    """Check the machines, HCCL's buffers, timeouts and ports, where the platform is npu or npu_emulated."""
    if run.as_npu:
        yield from (check_machine(run), check_buffer(run), check_timeouts(run), check_ports(run))


def decodes_by_mc2(run: RunSpec) -> bool:
    """Return whether the rollout exchanges tokens between experts by MC2 in decode."""
    return run.samples and run.recipe.rollout.enable_expert_parallel and run.world_size >= MC2_MIN_RANKS


def buffer_need_mib(run: RunSpec) -> int:
    """Return the MiB of HCCL_BUFFSIZE that vllm-ascend's exchange of experts (MC2) needs in decode; 0 without MC2.

    The documentation of torch_npu.npu_moe_distribute_dispatch for Atlas A3 (op-plugin 7.1.0) asks for
    2^20 x (HCCL_BUFFSIZE - 2) / 2 >= tokens x 2 x (hidden + 128) x (ep x local experts + top-k + 1), where `tokens` is
    the largest decode batch of a replica, split over TP (vllm_ascend.ops.fused_moe.fused_experts_with_mc2). With less
    the operator ends with an address out of range and names no variable (vllm-ascend issue 2674). For A2 the same page
    has HCCL_BUFFSIZE >= 2 x (tokens x ep x min(local experts, top-k) x hidden x 2 bytes + 2 MiB).
    """
    if not decodes_by_mc2(run):
        return 0
    ep, local, tokens = _expert_exchange(run)
    if run.recipe.hardware != "a3":
        sent = tokens * ep * min(local, run.model.num_experts_per_tok) * run.model.hidden_size * 2
        return math.ceil(2 * (sent / _MIB + 2))
    moved = tokens * 2 * (run.model.hidden_size + 128) * (ep * local + run.model.num_experts_per_tok + 1)
    return math.ceil(2 * moved / _MIB + 2)


def _expert_exchange(run: RunSpec) -> tuple[int, int, int]:
    """Return the rollout's (ranks of an expert group, experts of each rank, tokens of a rank in decode)."""
    tp = run.rollout.tp
    ep, experts = tp * run.recipe.rollout.data_parallel_size, run.model.n_routed_experts
    batch = max(run.max_num_seqs, *run.graph_sizes, 0)  # decode batches are padded to a graph's size
    return ep, experts // ep, math.ceil(batch / tp)


def mc2_faults(limits: Mc2Limits, model: ModelShape, ranks: int, tokens: int) -> list[str]:
    """Return why MC2 cannot exchange a rank's `tokens` in decode among the experts of an instance of `ranks` ranks."""
    hidden, experts, top_k = model.hidden_size, model.n_routed_experts, model.num_experts_per_tok
    split, group_sizes = experts // ranks, ", ".join(map(str, limits.ranks))
    change, without = "change recipe.rollout.data_parallel_size", _WITHOUT_MC2_TEXT
    checks = [
        (ranks in limits.ranks, f"a rollout instance has {ranks} ranks", group_sizes, change),
        (tokens <= limits.tokens, f"a rank decodes {tokens} tokens", limits.tokens, "lower max_num_seqs"),
        (split <= limits.rank_experts, f"a rank has {split} experts", limits.rank_experts, change),
        (experts <= limits.experts, f"a layer has {experts} experts", limits.experts, without),
        (hidden in limits.hidden, f"the model's hidden size is {hidden}", limits.hidden_text, without),
        (top_k <= limits.top_k, f"a token has {top_k} experts", limits.top_k, without),
    ]
    return [f"{found}, MC2 allows {allowed}: {todo}" for fits, found, allowed, todo in checks if not fits]


def check_machine(run: RunSpec) -> Check:
    """Check that recipe.hardware has nodes of this size and supports the run's settings of HCCL and MC2."""
    machine, dies = run.hardware, run.verl.trainer.n_gpus_per_node
    most, half, mode, faults = machine.node_dies, machine.module_dies, run.recipe.hccl.expansion_mode, []
    if dies != machine.usable_dies(dies):
        sizes = f"at most {half} or {most}" if half < most else f"at most {most}"
        todo = f"trainer.nnodes={math.ceil(run.world_size / most)} trainer.n_gpus_per_node={most}"
        faults.append(f"trainer.n_gpus_per_node is {dies}, expected {sizes}: set {todo}")
    if mode not in machine.expansion_modes:
        modes = " or ".join(machine.expansion_modes)
        faults.append(f"recipe.hccl.expansion_mode is {mode}, expected {modes} for training")
    if decodes_by_mc2(run):
        ep, _, tokens = _expert_exchange(run)
        faults += mc2_faults(machine.mc2, run.model, ep, tokens)
    if faults:
        return Check("hardware", False, f"{machine.title} (recipe.hardware): {'; '.join(faults)}")
    kinds = [name for name, kind in HARDWARE.items() if kind.node_dies == dies < most]
    held = f"{machine.title}: {dies} dies of a node of {most}"
    held += "".join(f"; for nodes of {dies} dies set recipe.hardware={kind}" for kind in kinds)
    return Check("hardware", True, held, note=bool(kinds))


def buffer_mib(run: RunSpec) -> int:
    """Return HCCL_BUFFSIZE in MiB: recipe.hccl.buffer_mib, or the need in whole hundreds, at least HCCL's default."""
    if run.recipe.hccl.buffer_mib is not None:
        return run.recipe.hccl.buffer_mib
    return max(DEFAULT_BUFFER_MIB, BUFFER_STEP_MIB * math.ceil(buffer_need_mib(run) / BUFFER_STEP_MIB))


def check_buffer(run: RunSpec) -> Check:
    """Check that HCCL's buffer holds what the rollout's experts exchange."""
    need, given = buffer_need_mib(run), buffer_mib(run)
    held = f"HCCL_BUFFSIZE {given} MiB, the experts' exchange in decode needs {need}"
    fault = (
        f"recipe.hccl.buffer_mib is {given} (HCCL_BUFFSIZE), expected at least {need}: vllm-ascend's exchange of "
        "experts in decode (MC2) does not fit; set it to null, or lower max_num_seqs and graph_batch_sizes"
    )
    return either("HCCL buffer", given >= need, held, fault)


class Group(NamedTuple):
    """Describe an HCCL group that holds rank 0.

    side: train or rollout; name: upstream's; small: whether recipe.hccl.small_groups_mib is the size of its buffers;
    communicates: whether a step of DeepSeek-V3 runs a collective on it, at which HCCL makes its communicator.
    """

    side: str
    name: str
    ranks: int
    small: bool
    communicates: bool


def hccl_groups(run: RunSpec) -> list[Group]:
    """Return the groups of several ranks that rank 0 makes on platform npu, in the order in which they are made.

    They are made by megatron.core.parallel_state.initialize_model_parallel of core_r0.8.0 and by MindSpeed
    (mindspeed.core.parallel_state.initialize_model_parallel_wrapper makes the expert groups twice), then by
    verl.workers.megatron_workers.ActorRolloutRefWorker._build_rollout and vLLM 0.9.1. Which of them communicate was
    read in the sources: transfers between pipeline stages run on the group pp (batch_p2p_comm), prompts are gathered
    over the tp group of verl's mesh, and no collective runs on vLLM's group of all ranks.
    """
    train, rollout = run.train, run.rollout
    tp, pp, dp, cp = train.tp, train.pp, train.dp, train.cp
    ep, rest = divmod(train.ep * (train.etp or tp), tp)  # Megatron too counts in groups of TP ranks
    if rest or not ep:
        raise ConfigError(
            f"actor.megatron.expert_model_parallel_size is {train.ep}, expected a multiple of "
            f"tensor_model_parallel_size {tp}: experts are split over whole groups of TP ranks"
        )
    split = cp > 1  # then the gradients of experts have groups of their own
    training = [
        ("dp", dp, False), ("dp_cp", dp * cp, True), ("cp", cp, True),
        ("mp", tp * pp, True), ("mp_exp", tp * pp, False), ("tp", tp, True), ("pp", pp, True),  # mp: gradient norm
        ("embd", min(pp, 2), False), ("tp_dp_cp", tp * dp * cp, False), ("tp_dp", tp * dp, False),
        ("tp_cp", tp * cp, False), ("tp_exp", tp, False), ("dp_modulo_exp", dp, False),
        *([("dp_modulo_exp_cp", dp * cp, False)] if split else []),
        # the expert groups, after those that Megatron makes as if experts were not split
        ("mp_exp", tp * ep * pp, False), ("tp_exp", tp * ep, True), ("exp", ep, False),
        ("dp_modulo_exp", dp * cp // ep, not split),
        *([("dp_modulo_exp_cp", dp * cp // ep, True)] if split else []),
        ("pp_new_stream", pp, False),
    ]  # fmt: skip
    instance, mc2 = rollout.tp * run.recipe.rollout.data_parallel_size, decodes_by_mc2(run)
    engine = [
        ("tp", rollout.tp, True),
        ("dp", run.recipe.rollout.data_parallel_size, True),
        (ROLLOUT_EXPERT_GROUP, instance, run.recipe.rollout.enable_expert_parallel),
        *([("mc2", instance, True)] if mc2 else []),  # row rollout.ascend_mc2_groups
    ]
    large = "mc2" if mc2 else ROLLOUT_EXPERT_GROUP
    small = run.recipe.hccl.small_groups_mib is not None
    made = [
        Group("train", "all ranks", train.world_size, False, True),
        *(
            Group("train", name, ranks, small and name not in TRAINING_EXPERT_GROUPS, used)
            for name, ranks, used in training
        ),
        Group("rollout", "verl's mesh, dp", train.world_size // rollout.tp, False, False),
        Group("rollout", "verl's mesh, tp", rollout.tp, False, True),
        Group("rollout", "vllm_world", train.world_size, False, False),
        *(Group("rollout", f"vllm_{name}", ranks, small and name != large, used) for name, ranks, used in engine),
        Group("rollout", "unfinished requests", run.recipe.rollout.data_parallel_size, False, True),
    ]
    sides = ("train", "rollout") if run.samples else ("train",)
    return [group for group in made if group.ranks > 1 and group.side in sides]


def group_buffer_mib(run: RunSpec, group: Group) -> int:
    """Return the MiB of each of a group's buffers."""
    small = run.recipe.hccl.small_groups_mib
    return buffer_mib(run) if small is None or not group.small else small


def buffer_bytes(run: RunSpec) -> dict[str, int]:
    """Return {train, rollout}: bytes of HCCL's buffers on a die, of the groups that communicate."""
    sizes = {"train": 0, "rollout": 0}
    for group in hccl_groups(run):
        if group.communicates:
            sizes[group.side] += BUFFERS_PER_GROUP * group_buffer_mib(run, group) * _MIB
    return sizes


def exec_timeout_s(run: RunSpec) -> int:
    """Return HCCL_EXEC_TIMEOUT in seconds: WATCHDOG_MARGIN_S less than recipe.train.distributed_timeout_minutes.

    torch_npu takes those minutes for the watchdog of its process groups and warns that plog, with HCCL's error, may not
    be recorded where they are not longer than HCCL's timeout (ProcessGroupHCCL's constructor).
    """
    return 60 * run.recipe.train.distributed_timeout_minutes - WATCHDOG_MARGIN_S


def check_timeouts(run: RunSpec) -> Check:
    """Check that the expansion mode allows the timeout of a collective, and that HCCL has one."""
    given, minutes = exec_timeout_s(run), run.recipe.train.distributed_timeout_minutes
    most = (AIV_EXEC_TIMEOUT_S + WATCHDOG_MARGIN_S) // 60
    fault = f"recipe.train.distributed_timeout_minutes is {minutes} (HCCL_EXEC_TIMEOUT {given} s), expected "
    if given <= 0:
        fault += "at least 2: HCCL times out a minute before torch's process groups do, and 0 is no time limit"
    else:
        fault += (
            f"at most {most}: with HCCL_OP_EXPANSION_MODE=AIV, HCCL caps it at {AIV_EXEC_TIMEOUT_S} s; lower it, or "
            "set recipe.hccl.expansion_mode=AI_CPU"
        )
    fits = 0 < given and (run.recipe.hccl.expansion_mode != "AIV" or given <= AIV_EXEC_TIMEOUT_S)
    return either("HCCL timeouts", fits, f"a collective times out after {given} s", fault)


def node_ports(run: RunSpec) -> dict[str, list[int]]:
    """Return {variable, or "all": [first, last]} of HCCL's ports, which must be free on every node on platform npu.

    HCCL_HOST_SOCKET_PORT_RANGE takes precedence. A2 does not support it beside MC2 (CANN envref_07_0143).
    """
    first = run.recipe.hccl.base_port
    host, last = first + IF_PORTS, first + HCCL_PORTS - 1
    ranges = {HOST_PORTS: [host, last]} if run.recipe.hardware == "a3" else {}
    return {IF_BASE_PORT: [first, host - 1], **ranges, "all": [first, last]}


def check_ports(run: RunSpec, proc: Path = PROC) -> Check:
    """Check that HCCL's ports are neither ephemeral ports of this machine nor in the plan of Ray's ports.

    `proc` holds the kernel's ip_local_port_range (the ephemeral ports, which Ray, torch and vLLM use too) and
    ip_local_reserved_ports (those of them that are not given out).
    """
    first, last = node_ports(run)["all"]
    name, ports_text = "HCCL ports", f"HCCL listens on ports {first} to {last}"
    try:
        low, high = map(int, (proc / "ip_local_port_range").read_text().split())
        reserved = _parse_ports((proc / "ip_local_reserved_ports").read_text().strip())
    except FileNotFoundError as error:
        text = f"{ports_text}; not compared with ephemeral ports, as this machine has no {error.filename}"
        return Check(name, True, text)
    ephemeral = [port for port in range(max(first, low), min(last, high) + 1) if port not in reserved]
    todo = "change recipe.hccl.base_port"
    if ephemeral:
        text = (
            f"{ports_text}, but {low} to {high} are this machine's ephemeral ports (net.ipv4.ip_local_port_range): "
            f"{todo}, or reserve them on every node: sysctl -w net.ipv4.ip_local_reserved_ports={first}-{last}"
        )
        return Check(name, False, text)
    taken = [(name, a, b) for name, (a, b) in RayPorts().spans().items() if a <= last and first <= b]
    if taken:
        names = ", ".join(f"{name} {a} to {b}" if b > a else f"{name} {a}" for name, a, b in taken)
        return Check(name, False, f"{ports_text}, which overlap those of {names}; {todo}")
    return Check(name, True, f"{ports_text}, outside this machine's ephemeral ports {low} to {high}")


def _parse_ports(text: str) -> set[int]:
    """Return the ports of a list such as 8080,61000-61143; an empty text has none."""
    ports: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        ports |= set(range(int(low), int(high or low) + 1))
    return ports
