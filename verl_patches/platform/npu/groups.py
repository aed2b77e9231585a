"""Set up HCCL's groups: a separate communicator for MC2, and small buffers for groups that need no HCCL_BUFFSIZE.

HCCL_BUFFSIZE applies to groups over which training and MC2 send tokens to experts, and to groups that are made without
options: the group of all ranks, verl's mesh and vLLM's count of unfinished requests. Other groups of Megatron and vLLM
get recipe.hccl.small_groups_mib.

Each communicator of a process holds twice its buffer in the die's memory. ProcessGroupHCCL.Options of torch_npu
2.5.1.post1 have hccl_config, whose hccl_buffer_size (MiB, an int) takes precedence over the variable (Ascend Extension
for PyTorch, "HCCL parameters through pg_options"). Not tried on a device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from verl_patches.current import Current

# groups over which tokens go to experts: names of MindSpeed-LLM
# (mindspeed_llm.core.parallel_state.initialize_model_parallel_decorator) and of vLLM
TRAINING_EXPERT_GROUPS, ROLLOUT_EXPERT_GROUP = frozenset({"exp", "tp_exp"}), "ep"


# MiB of a small group's buffer in this process; None: groups get no options, and HCCL_BUFFSIZE applies to all
small_groups_mib: Current[int | None] = Current(None)


def training_group_options(get_nccl_options_wrapper: Callable) -> Callable:
    """Wrap MindSpeed-LLM's wrapper of Megatron's get_nccl_options, whose options hold a name only: add buffer sizes."""

    @functools.wraps(get_nccl_options_wrapper)
    def wrapper(get_nccl_options: Callable) -> Callable:
        by_name = get_nccl_options_wrapper(get_nccl_options)

        @functools.wraps(by_name)
        def group_options(pg_name: str, nccl_comm_cfgs: Any) -> Any:
            options = by_name(pg_name, nccl_comm_cfgs)
            if small_groups_mib.value is not None and pg_name not in TRAINING_EXPERT_GROUPS:
                options.hccl_config = {**options.hccl_config, "hccl_buffer_size": small_groups_mib.value}
            return options

        return group_options

    return wrapper


def rollout_group_options(init_model_parallel_group: Callable) -> Callable:
    """Wrap vLLM's init_model_parallel_group to give its tp, pp, dp and ep groups on the device HCCL options.

    vLLM's world group needs none: no collective runs on it, and HCCL makes a communicator with a group's first
    collective.
    """

    @functools.wraps(init_model_parallel_group)
    def init(
        group_ranks: list[list[int]],
        local_rank: int,
        backend: str,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
    ) -> Any:
        small = group_name != ROLLOUT_EXPERT_GROUP or _decodes_by_mc2()  # MC2, which needs most, has its own group then
        with _default_hccl_options(_hccl_options(group_name) if small else None):
            return init_model_parallel_group(
                group_ranks, local_rank, backend, use_message_queue_broadcaster, group_name=group_name
            )

    return init


def add_mc2_groups(init_model_parallel_group: Callable) -> Callable:
    """Wrap vLLM's init_model_parallel_group to add a second group of the same ranks to each EP group, for MC2 alone.

    vllm-ascend gives MC2 the EP group's communicator, on which batches with prefills exchange tokens by all-to-all.
    CANN demands a communicator on which no other operator runs, and HCCL allows no eager calls on one that graphs use
    (docs/line-a3.md). The group is `mc2_group` of vLLM's EP coordinator and is destroyed with it. It takes no options,
    as HCCL_BUFFSIZE is sized for MC2. Runs that do not use MC2 have no such group.
    """

    @functools.wraps(init_model_parallel_group)
    def init(group_ranks: list[list[int]], local_rank: int, backend: str, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        coordinator = init_model_parallel_group(group_ranks, local_rank, backend, *args, **kwargs)
        if kwargs.get("group_name") == ROLLOUT_EXPERT_GROUP and _decodes_by_mc2():
            for ranks in group_ranks:  # every rank makes every group, in vLLM's order
                group = dist.new_group(ranks, backend=backend, pg_options=None)
                if coordinator.rank in ranks:
                    coordinator.mc2_group = group
            coordinator.destroy = functools.partial(_destroy, coordinator, coordinator.destroy)
        return coordinator

    return init


def _decodes_by_mc2() -> bool:
    """Return whether vllm-ascend uses MC2 for batches of decodes, as set_ascend_forward_context decides."""
    import torch.distributed as dist
    from vllm.config import get_current_vllm_config
    from vllm_ascend.ascend_forward_context import FusedMoEState, get_fused_moe_state

    split = get_current_vllm_config().parallel_config.enable_expert_parallel
    return get_fused_moe_state(dist.get_world_size() if split else 1, with_prefill=False) == FusedMoEState.MC2


def _destroy(coordinator: Any, destroy: Callable[[], None]) -> None:
    import torch.distributed as dist

    dist.destroy_process_group(coordinator.mc2_group)
    destroy()


def use_mc2_group(init: Callable) -> Callable:
    """Wrap AscendUnquantizedFusedMoEMethod.__init__ to give MC2's ops the name of their own communicator.

    The name is the method's moe_all_to_all_group_name, which only MC2's dispatch and combine read; the all-to-all of
    prefills takes vLLM's EP group itself. HCCL makes the communicator when its name is requested.
    """

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch
        from vllm.distributed import get_ep_group

        init(self, *args, **kwargs)
        group = getattr(get_ep_group(), "mc2_group", None)
        if group is not None:
            backend = group._get_backend(torch.device("npu"))
            self.moe_all_to_all_group_name = backend.get_hccl_comm_name(torch.distributed.get_rank(group=group))

    return __init__


def _hccl_options(name: str | None) -> Any:
    if small_groups_mib.value is None or name is None:
        return None
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"group_name": f"vllm_{name}", "hccl_buffer_size": small_groups_mib.value}
    return options


@contextlib.contextmanager
def _default_hccl_options(options: Any) -> Iterator[None]:
    """Let torch.distributed.new_group pass `options` to HCCL groups in the block; vLLM's GroupCoordinator takes none.

    A caller that passes pg_options itself, None included, keeps them.
    """
    import torch.distributed as dist

    if options is None:
        yield
        return
    new_group = dist.new_group

    @functools.wraps(new_group)
    def with_options(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        if str(backend) == "hccl":
            kwargs.setdefault("pg_options", options)
        return new_group(*args, backend=backend, **kwargs)

    dist.new_group = with_options
    try:
        yield
    finally:
        dist.new_group = new_group
