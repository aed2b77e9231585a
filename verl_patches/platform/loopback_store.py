"""Let the store of torch.distributed listen on the loopback alone, where all ranks are on one machine.

torch's rank 0 makes a store that listens on all interfaces (torch.distributed.rendezvous._create_c10d_store), to which
any machine could write. With a variable of torchrun's set, rank 0 makes none: all ranks connect to ours.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from verl_patches.current import Current

_CONNECT_ONLY = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # torch 2.5 reads both
held_stores: Current[list[Any]] = Current([])  # a store listens as long as its object exists


@contextmanager
def loopback_store() -> Iterator[None]:
    """Start torch.distributed in the block with a store on the loopback, if MASTER_ADDR is one; else change nothing."""
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    if dist.is_initialized() or not address[0].startswith("127."):
        yield
        return
    if os.environ["RANK"] == "0":
        listener, world = socket.create_server(address), int(os.environ["WORLD_SIZE"])
        options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        held_stores.value.append(dist.TCPStore(*address, world, True, **options))
    os.environ.update(_CONNECT_ONLY)
    try:
        yield
    finally:
        for name in _CONNECT_ONLY:  # vLLM starts groups of its own later, each with its store
            del os.environ[name]
