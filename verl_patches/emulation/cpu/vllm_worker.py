"""Adapt vLLM's V0 CPU worker and communicator to a rollout in the training process, where each rank drives an engine.

Experts are split over data-parallel (DP) ranks, so every forward pass is a collective: a rank that has finished its
sequences must go on taking part. V1, which production runs, does it in `LLMEngine.has_unfinished_requests_dp` and
`execute_dummy_batch`; V0 does not. Here:

    rank with work      before each forward pass: vote "working"            -> pass
    rank without work   vote "finished" -> someone works: dummy pass, again -> all finished: leave `generate`

so that a pass happens on all ranks or on none, whatever each engine's scheduler decides in between.
"""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.sampling_params import SamplingParams
from vllm.sequence import ExecuteModelRequest, SequenceData, SequenceGroupMetadata
from vllm.worker.cpu_worker import CPUWorker

log = logging.getLogger(__name__)


class RolloutCpuWorker(CPUWorker):
    """Adapt vLLM's CPUWorker to external_launcher: verl starts one process a rank, each with its own engine."""

    def __init__(self, *args, is_driver_worker: bool = False, **kwargs):
        # CPUWorker asserts that the driver is rank 0; with external_launcher every rank drives its own engine
        super().__init__(*args, is_driver_worker=False, **kwargs)
        self.is_driver_worker = self.model_runner.is_driver_worker = is_driver_worker

    def get_cpus_id_binding_based_on_numa_nodes(self) -> str:
        """Return "all": threads stay where the launcher put them (upstream binds by global rank in a compiled op)."""
        return "all"

    def init_device(self) -> None:
        """Run upstream's, then make the lockstep of the DP ranks that share experts."""
        super().init_device()
        self.lockstep = Lockstep.from_config(self.parallel_config)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Return (blocks, 0): VLLM_CPU_KVCACHE_SPACE, but at most what all sequences that may run at once can fill."""
        allowed, _ = super().determine_num_available_blocks()
        per_sequence = -(-self.model_config.max_model_len // self.cache_config.block_size)
        useful = self.scheduler_config.max_num_seqs * per_sequence
        return min(allowed, useful + useful // 50 + 1), 0  # the scheduler leaves 1% free before it admits a prompt

    def execute_model(self, execute_model_req: ExecuteModelRequest | None = None):
        """Tell the DP ranks that share experts that this rank still works, then run upstream's."""
        if self.lockstep is not None and execute_model_req is not None:
            self.lockstep.any_rank_works(works=True)
        return super().execute_model(execute_model_req)

    def run_dummy_steps(self) -> None:
        """Take part in the other DP ranks' steps, with a batch of one unused token, until all of them have finished."""
        assert self.lockstep is not None  # _run_engine checks this first
        steps = 0
        while self.lockstep.any_rank_works(works=False):
            super().execute_model(self._dummy_request())
            steps += 1
        log.debug("DP rank %d ran %d dummy steps", self.parallel_config.data_parallel_rank, steps)

    def _dummy_request(self) -> ExecuteModelRequest:
        """Return a greedy request of one token without cache slots: no random number is drawn, its output is unused."""
        group = SequenceGroupMetadata(
            request_id="dp-dummy",
            is_prompt=True,
            seq_data={0: SequenceData.from_seqs([0])},
            sampling_params=SamplingParams(temperature=0.0),
            block_tables={0: None},
            computed_block_nums=[],
            token_chunk_size=1,
        )
        return ExecuteModelRequest(seq_group_metadata_list=[group])


class RolloutCpuCommunicator(CpuCommunicator):
    """Extend vLLM's CpuCommunicator to send tokens to the ranks that hold their experts, and sum the results.

    In vLLM 0.9.1 only the CUDA and XPU communicators have dispatch and combine; CpuCommunicator inherits no-ops of
    vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase, with which expert
    parallelism across DP silently drops the other ranks' experts.
    The exchange itself is vLLM's own NaiveAll2AllManager (broadcasts and an all-reduce inside the DP group).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import NaiveAll2AllManager

            self.all2all_manager = NaiveAll2AllManager(self.cpu_group)

    def dispatch(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather [T, H] and [T, E] of all DP ranks, concatenated in rank order."""
        if self.all2all_manager is None:
            return super().dispatch(hidden_states, router_logits)
        return self.all2all_manager.dispatch(hidden_states, router_logits)

    def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum [all DP ranks' T, H] over the DP group and keep this rank's rows."""
        if self.all2all_manager is None:
            return super().combine(hidden_states)
        return self.all2all_manager.combine(hidden_states)


STALL_S = 600.0  # a rank that waits this long for the others' vote gives up, with a message instead of a hang


class Lockstep:
    """Vote in one DP group; each `any_rank_works` is collective: every rank of the group must call it equally often."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int):
        self.group, self.rank, self.size = group, rank, size

    @classmethod
    def from_config(cls, parallel_config) -> Lockstep | None:
        """Return the lockstep of this rank's DP group, after vLLM's groups exist; None without data parallelism.

        Raises RuntimeError if vLLM built its groups without data parallelism before this engine was built.
        """
        size = parallel_config.data_parallel_size
        if size == 1:
            return None
        from vllm.distributed import get_dp_group

        dp = get_dp_group()
        if dp.world_size != size:
            raise RuntimeError(
                f"vLLM's DP group: expected data_parallel_size={size} ranks, found {dp.world_size}. A process's first "
                "engine builds its groups; build the data-parallel engine first, or in its own process"
            )
        return cls(dp.cpu_group, dp.rank_in_group, size)

    def any_rank_works(self, works: bool) -> bool:
        """Vote, and return whether any rank of the group (this one included) is about to run a forward pass.

        Raises RuntimeError if another rank does not vote within STALL_S seconds, or has exited.
        """
        vote = torch.tensor([int(works)], dtype=torch.int32)
        try:
            work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            work.wait(datetime.timedelta(seconds=STALL_S))
        except RuntimeError as error:
            state = "has sequences to generate" if works else "has finished"
            raise RuntimeError(
                f"rollout DP rank {self.rank} of {self.size} {state}, but another rank of its group did not take part "
                f"in the next step within {STALL_S:g} s. Ranks that share experts must call generate() equally often; "
                "look for the first error in the other ranks' logs, and check that row platform.vllm_dp_lockstep is on"
            ) from error
        return bool(vote.item())


def drain_after_run(original: Callable) -> Callable:
    """Wrap `LLM._run_engine` to go on stepping after its own requests until every DP rank has finished (V0 engines)."""

    @functools.wraps(original)
    def _run_engine(self, **kwargs):
        outputs = original(self, **kwargs)
        worker = getattr(getattr(self.llm_engine, "model_executor", None), "driver_worker", None)
        if getattr(worker, "lockstep", None) is not None:
            worker.run_dummy_steps()
        return outputs

    return _run_engine
