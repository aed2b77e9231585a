"""HCCL's buffers by group: groups of Megatron and vLLM that exchange no experts get recipe.hccl.small_groups_mib.

HCCL_BUFFSIZE holds for those that do, and for those that are made without options: the group of all ranks, verl's mesh
and vLLM's count of unfinished requests.

Each communicator of a process holds twice its buffer in the die's memory. ProcessGroupHCCL.Options of torch_npu
2.5.1.post1 have hccl_config, whose hccl_buffer_size (MiB, an int) takes precedence over the variable (Ascend Extension
for PyTorch, "HCCL parameters through pg_options"). Not tried on a device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

# those over which tokens go to experts: names of MindSpeed-LLM (core/parallel_state.py:146, :177) and of vLLM
EXPERTS_IN_TRAINING, EXPERTS_IN_ROLLOUT = frozenset({"exp", "tp_exp"}), frozenset({"ep"})


class SmallGroups:
    """MiB of a small group's buffer in this process; None: groups get no options, and HCCL_BUFFSIZE holds for all."""

    mib: int | None = None


def options_of_training(get_nccl_options_wrapper: Callable) -> Callable:
    """Row provider for MindSpeed-LLM's wrapper of Megatron's get_nccl_options, whose options hold the name only."""

    @functools.wraps(get_nccl_options_wrapper)
    def wrapper(get_nccl_options: Callable) -> Callable:
        by_name = get_nccl_options_wrapper(get_nccl_options)

        @functools.wraps(by_name)
        def options_of(pg_name: str, nccl_comm_cfgs: Any) -> Any:
            options = by_name(pg_name, nccl_comm_cfgs)
            if SmallGroups.mib is not None and pg_name not in EXPERTS_IN_TRAINING:
                options.hccl_config = {**options.hccl_config, "hccl_buffer_size": SmallGroups.mib}
            return options

        return options_of

    return wrapper


def options_of_rollout(init_model_parallel_group: Callable) -> Callable:
    """Row provider for the function by which vLLM makes its tp, pp, dp and ep groups on the device, without options.

    Its world group needs none: no collective runs on it, and HCCL makes a communicator with a group's first collective.
    """

    @functools.wraps(init_model_parallel_group)
    def init(
        group_ranks: list[list[int]],
        local_rank: int,
        backend: str,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
    ) -> Any:
        with _new_groups_with(_options(group_name)):
            return init_model_parallel_group(
                group_ranks, local_rank, backend, use_message_queue_broadcaster, group_name=group_name
            )

    return init


def _options(name: str | None) -> Any:
    if SmallGroups.mib is None or name is None or name in EXPERTS_IN_ROLLOUT:
        return None
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"group_name": f"vllm_{name}", "hccl_buffer_size": SmallGroups.mib}
    return options


@contextlib.contextmanager
def _new_groups_with(options: Any) -> Iterator[None]:
    """Inside, torch.distributed.new_group hands `options` to groups of HCCL: vLLM's GroupCoordinator takes none."""
    import torch.distributed as dist

    if options is None:
        yield
        return
    new_group = dist.new_group

    @functools.wraps(new_group)
    def with_options(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        given = {"pg_options": options} if str(backend) == "hccl" else {}
        return new_group(*args, backend=backend, **given, **kwargs)

    dist.new_group = with_options
    try:
        yield
    finally:
        dist.new_group = new_group
