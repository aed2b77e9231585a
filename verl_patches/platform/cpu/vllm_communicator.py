"""vLLM's CPU communicator with dispatch and combine, so that data-parallel ranks can share experts."""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class RolloutCpuCommunicator(CpuCommunicator):
    """CpuCommunicator that sends tokens to the ranks that hold their experts, and sums what comes back.

    In vLLM 0.9.1 only the CUDA and XPU communicators have dispatch and combine; CpuCommunicator inherits no-ops
    (base_device_communicator.py:246), with which expert parallelism across DP silently drops the other ranks' experts.
    The exchange itself is vLLM's own NaiveAll2AllManager (broadcasts and an all-reduce inside the DP group).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import NaiveAll2AllManager

            self.all2all_manager = NaiveAll2AllManager(self.cpu_group)

    def dispatch(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] and [T, E] of this rank to those of all DP ranks, laid end to end in rank order."""
        if self.all2all_manager is None:
            return super().dispatch(hidden_states, router_logits)
        return self.all2all_manager.dispatch(hidden_states, router_logits)

    def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum [all DP ranks' T, H] over the DP group and keep this rank's rows."""
        if self.all2all_manager is None:
            return super().combine(hidden_states)
        return self.all2all_manager.combine(hidden_states)
