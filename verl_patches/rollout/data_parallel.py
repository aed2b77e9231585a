"""Data-parallel rollout under an external launcher: which DP rank this process is, and where its group meets.

verl starts one process a rank and each builds its own `LLM`. With `data_parallel_size` among the engine's arguments
vLLM 0.9.1 takes DP rank 0 and a random port in every process (config.py:1885-1887): it expects to start the ranks
itself. Rank order is vLLM's own (parallel_state.py:1006): instance x dp x pp x tp, tp fastest.

The meeting point is agreed through the store of torch.distributed, which verl has set up before: the first rank of each
group picks a free port on its own host and publishes it: no formula over ranks.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
from collections.abc import Callable

from verl_patches.errors import ConfigError

log = logging.getLogger(__name__)

_meetings = itertools.count()  # engines of one process are built in the same order on every rank


def dp_place(rank: int, world_size: int, dp: int, ranks_per_replica: int) -> tuple[int, int]:
    """(DP rank, global rank of the first rank of its DP group) of global `rank`.

    `ranks_per_replica` is tp * pp. Groups hold the ranks of one instance with equal tp and pp coordinates.
    Raises ConfigError if `world_size` is no multiple of dp * ranks_per_replica.
    """
    instance = dp * ranks_per_replica
    if world_size % instance:
        raise ConfigError(
            f"rollout: world size {world_size} is no multiple of "
            f"data_parallel_size {dp} x {ranks_per_replica} ranks a replica (tp x pp); "
            "change actor_rollout_ref.rollout.tensor_model_parallel_size or "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.data_parallel_size"
        )
    dp_rank = rank % instance // ranks_per_replica
    return dp_rank, rank - dp_rank * ranks_per_replica


def place_in_launcher(original: Callable) -> Callable:
    """`ParallelConfig.__post_init__` that knows its DP rank and meeting point when a launcher started the processes."""

    @functools.wraps(original)
    def __post_init__(self) -> None:
        asked = self.data_parallel_size  # what the engine's arguments say; upstream falls back to the environment for 1
        original(self)
        if asked > 1 and self.distributed_executor_backend == "external_launcher":
            _place(self)

    return __post_init__


def _place(parallel_config) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigError(
            f"rollout: data_parallel_size {parallel_config.data_parallel_size} with external_launcher needs "
            "torch.distributed to be initialised before LLM() is built, as verl's workers do; "
            "call torch.distributed.init_process_group first"
        )
    rank, dp, replica = dist.get_rank(), parallel_config.data_parallel_size, parallel_config.world_size
    dp_rank, leader = dp_place(rank, dist.get_world_size(), dp, replica)
    ip, port = _meet(leader, rank)
    parallel_config.data_parallel_rank = parallel_config.data_parallel_rank_local = dp_rank
    parallel_config.data_parallel_master_ip, parallel_config.data_parallel_master_port = ip, port
    log.info("rollout rank %d is DP rank %d of %d, its group meets at %s:%d", rank, dp_rank, dp, ip, port)


def _meet(leader: int, rank: int) -> tuple[str, int]:
    """Address that the group's leader offers; every rank of the group gets the same."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, key = _get_default_store(), f"verl_patches/rollout_dp/{next(_meetings)}/{leader}"
    if rank == leader:
        store.set(key, "{}:{}".format(*_free_address()))
    ip, _, port = store.get(key).decode().rpartition(":")
    return ip, int(port)


def _free_address() -> tuple[str, int]:
    """This host's address towards the launcher's master, and a port that is free on it now, as the next one is."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))
    family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # chooses a route, sends nothing
        ip = probe.getsockname()[0]
    for _ in range(100):  # vLLM's V1 engine meets at the port and at the next one: both must be free
        with socket.create_server((ip, 0), family=family) as server:
            port = server.getsockname()[1]
            try:
                socket.create_server((ip, port + 1), family=family).close()
            except (OSError, OverflowError):
                continue
            return ip, port
    raise ConfigError(f"rollout: no two neighbouring ports are free on {ip} for the engines' DP group; free some")
