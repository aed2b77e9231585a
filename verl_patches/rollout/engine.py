"""Build verl's in-process vLLM engine with the right arguments, router dtype, MLA projections and data-parallel ranks.

Data-parallel rollout under an external launcher: verl starts one process per rank and each builds its own `LLM`. With
`data_parallel_size` among the engine's arguments vLLM 0.9.1 takes DP rank 0 and a random port in every process
(vllm.config.ParallelConfig.__post_init__), because it expects to start the ranks itself. Rank order is vLLM's own
(vllm.distributed.parallel_state.initialize_model_parallel): instance x dp x pp x tp, tp fastest. The group's address
goes through the store of torch.distributed, which verl has initialised before: the first rank of each group takes a
port on its own host and publishes it there.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from verl_patches.current import Current
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import edit_for_vllm, reduce_layers
from verl_patches.memory.live_memory import absorb_in_place
from verl_patches.rollout.ascend import PREFIX_CACHING

log = logging.getLogger(__name__)
_DP_PORT = "VLLM_DP_MASTER_PORT"
held_ports: Current[list[socket.socket]] = Current([])  # one for each DP group that this process leads


def engine_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments `given` to `LLM.__init__`, without those that vLLM or vllm-ascend refuses.

    verl.workers.rollout.vllm_rollout.vllm_rollout_spmd.vLLMRollout of verl 0.4.0 always passes limit_mm_per_prompt
    (None for text) and disable_mm_preprocessor_cache; vLLM 0.9.1 wants a dict for the first and refuses the second for
    text-only models (vllm.config.ModelConfig._init_multimodal_config). Unless `quantization` is set, the model's
    configuration goes through layout/model_folder.py before vLLM looks for a quantization method
    (vllm.config.ModelConfig.__post_init__); the caller's own hf_overrides come after it. vLLMRollout of verl 54c9b736
    writes enable_prefix_caching=True and passes engine_kwargs as further keywords, so the value of
    recipe.rollout.ascend.prefix_caching comes in additional_config.
    """
    arguments = dict(given)
    options = dict(arguments.get("additional_config") or {})
    if PREFIX_CACHING in options:
        arguments["enable_prefix_caching"] = options.pop(PREFIX_CACHING)
        arguments["additional_config"] = options
    if "limit_mm_per_prompt" in arguments and arguments["limit_mm_per_prompt"] is None:
        del arguments["limit_mm_per_prompt"]
        arguments.pop("disable_mm_preprocessor_cache", None)
    if arguments.get("quantization") is None:
        arguments["hf_overrides"] = _model_view(arguments.get("hf_overrides") or {})
    return arguments


def _model_view(overrides: Callable | dict[str, Any]) -> Callable:
    def view(hf_config: Any) -> Any:
        hf_config = edit_for_vllm(hf_config)
        if callable(overrides):
            return overrides(hf_config)
        reduce_layers(hf_config, overrides.get("num_hidden_layers"))
        hf_config.update(overrides)
        return hf_config

    return view


def route_in_fp32(original: Callable) -> Callable:
    """Wrap `DeepseekV2MoE.__init__` so that logits, scores and bias of its router are fp32 in any model dtype.

    vLLM 0.9.1 computes logits and scores in the model's dtype and has the bias in it
    (vllm.model_executor.models.deepseek_v2.DeepseekV2MoE). Training and transformers route in fp32, and the
    checkpoint's bias is fp32: in bf16 (8 bits) close scores change order, and a token is routed to other experts than
    in training. The gate's weight is stored in fp32 (7 MB a layer at 671B); its input is cast to fp32.
    """

    @functools.wraps(original)
    def __init__(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        for parameter in self.gate.parameters():  # weight, and the bias, which the experts' layer shares
            parameter.data = parameter.data.float()
        self.gate.register_forward_pre_hook(lambda gate, inputs: (inputs[0].float(), *inputs[1:]))

    return __init__


class PreemptionCounter:
    """Count the responses that an engine preempts: their KV blocks go to others, and their tokens are computed again.

    V0 counts them itself. V1 does only with log_stats, with which a decode step does more work on the host; here each
    is counted when V1's scheduler resumes it.
    """

    def __init__(self, llm_engine: Any) -> None:
        self._resumed = self._taken = 0
        self._own_counters = getattr(llm_engine, "scheduler", None)  # V0's: one for each pipeline stage
        if self._own_counters is None:
            scheduler = llm_engine.engine_core.engine_core.scheduler
            scheduler.schedule = self._counting(scheduler.schedule)

    def _counting(self, schedule: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(schedule)
        def counted() -> Any:
            output = schedule()
            self._resumed += sum(request.resumed_from_preemption for request in output.scheduled_cached_reqs)
            return output

        return counted

    def take(self) -> int:
        """Return the preemptions since the last call."""
        total = self._resumed
        if self._own_counters is not None:
            total = sum(scheduler.num_cumulative_preemption for scheduler in self._own_counters)
        taken, self._taken = self._taken, total
        return total - taken


def refresh_absorbed_mla(load_weights: Callable) -> Callable:
    """Wrap `DeepseekV2ForCausalLM.load_weights` so that it recomputes MLA's absorbed projections from the new weights.

    vLLM derives W_UV and W_UK_T from kv_b_proj once, after it has built the engine
    (Attention.process_weights_after_loading). They follow later weights only where they are views of it; vllm-ascend
    copies them (vllm_ascend.attention.mla_v1.AscendMLAImpl.process_weights_after_loading), and MindSpeed makes
    torch.Tensor.view copy. The first load comes before vLLM derives them, and recomputes nothing.
    """

    @functools.wraps(load_weights)
    def load(self, *args, **kwargs):
        loaded = load_weights(self, *args, **kwargs)
        for layer in self.model.layers[self.model.start_layer : self.model.end_layer]:
            absorb_in_place(layer.self_attn.mla_attn)
        return loaded

    return load


def dp_rank_and_leader(rank: int, world_size: int, dp: int, ranks_per_replica: int) -> tuple[int, int]:
    """Return (DP rank, global rank of the first rank of its DP group) of global `rank`.

    `ranks_per_replica` is tp * pp. Groups hold the ranks of one instance with equal tp and pp coordinates.
    Raises ConfigError if `world_size` is not a multiple of dp * ranks_per_replica.
    """
    instance = dp * ranks_per_replica
    if world_size % instance:
        raise ConfigError(
            f"rollout: world size is {world_size}; expected a multiple of "
            f"data_parallel_size {dp} x {ranks_per_replica} ranks a replica (tp x pp); "
            "change actor_rollout_ref.rollout.tensor_model_parallel_size or "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.data_parallel_size"
        )
    dp_rank = rank % instance // ranks_per_replica
    return dp_rank, rank - dp_rank * ranks_per_replica


def dp_ranks(parallel_config: Any) -> range:
    """Return the global ranks of this process's DP group, for an engine that a launcher started on each rank."""
    import torch.distributed as dist

    dp, replica = parallel_config.data_parallel_size, parallel_config.world_size
    leader = dp_rank_and_leader(dist.get_rank(), dist.get_world_size(), dp, replica)[1]
    return range(leader, leader + dp * replica, replica)


def set_dp_rank_in_launcher(original: Callable) -> Callable:
    """Wrap `ParallelConfig.__post_init__` to set DP rank and group address when a launcher started the processes."""

    @functools.wraps(original)
    def __post_init__(self) -> None:
        requested = self.data_parallel_size  # the engine's argument; upstream reads the environment where it is 1
        original(self)
        if requested > 1 and self.distributed_executor_backend == "external_launcher":
            _set_dp_rank(self)

    return __post_init__


def _set_dp_rank(parallel_config) -> None:
    import torch.distributed as dist

    if set_to := os.environ.get(_DP_PORT):
        raise ConfigError(
            f"rollout: {_DP_PORT} is {set_to}, expected unset: vllm-ascend uses this one port for the DP groups of all "
            "TP ranks (vllm_ascend.patch.platform.patch_common.patch_distributed.parallel_config_get_dp_port), "
            "but each group needs its own; unset it in the shell that runs `ray start`"
        )
    rank, dp, replica = dist.get_rank(), parallel_config.data_parallel_size, parallel_config.world_size
    dp_rank, leader = dp_rank_and_leader(rank, dist.get_world_size(), dp, replica)
    ip, port = _group_address(leader, rank)
    parallel_config.data_parallel_rank = parallel_config.data_parallel_rank_local = dp_rank
    parallel_config.data_parallel_master_ip, parallel_config.data_parallel_master_port = ip, port
    log.info("rollout rank %d is DP rank %d of %d, group address %s:%d", rank, dp_rank, dp, ip, port)


def _group_address(leader: int, rank: int) -> tuple[str, int]:
    """Return the (IP, port) that the group's leader has published; every rank of the group gets the same."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    engine = store.add(f"verl_patches/rollout_dp/engines_of/{rank}", 1)  # all ranks build engines in the same order
    key = f"verl_patches/rollout_dp/{engine}/{leader}"
    if rank == leader:
        store.set(key, "{}:{}".format(*_hold_address()))
    ip, _, port = store.get(key).decode().rpartition(":")
    return ip, int(port)


def _hold_address() -> tuple[str, int]:
    """Return this host's address towards the launcher's master, and a port that this process keeps from others.

    The port is bound until the process ends, but not listened on, so the kernel never hands it out for port 0, and
    vLLM's TCPStore can still listen on it, as both sockets have SO_REUSEADDR. Only this one port need be kept: for the
    engine's worker vLLM takes the next port, but listens on it only where torch.distributed is not initialised
    (vllm.distributed.parallel_state.init_distributed_environment).
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))
    family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: this chooses a route and sends nothing
        ip = probe.getsockname()[0]
    both = socket.has_dualstack_ipv6()
    port = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if both:
        port.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    port.bind(("", 0))  # TCPStore listens on all addresses too
    held_ports.value.append(port)
    return ip, port.getsockname()[1]
