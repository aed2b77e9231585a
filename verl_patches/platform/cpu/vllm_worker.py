"""vLLM's V0 CPU worker as an in-process rollout needs it: any rank drives, DP ranks keep in step."""

from __future__ import annotations

import logging

from vllm.sampling_params import SamplingParams
from vllm.sequence import ExecuteModelRequest, SequenceData, SequenceGroupMetadata
from vllm.worker.cpu_worker import CPUWorker

from verl_patches.platform.cpu.vllm_lockstep import Lockstep

log = logging.getLogger(__name__)


class RolloutCpuWorker(CPUWorker):
    """CPUWorker for external_launcher: one process a rank, started by verl, each with an engine of its own."""

    def __init__(self, *args, is_driver_worker: bool = False, **kwargs):
        # cpu_worker.py:150 asserts that the driver is rank 0; with external_launcher every rank drives its own engine
        super().__init__(*args, is_driver_worker=False, **kwargs)
        self.is_driver_worker = self.model_runner.is_driver_worker = is_driver_worker

    def get_cpus_id_binding_based_on_numa_nodes(self) -> str:
        """"all": threads stay where the launcher put them (upstream binds by global rank, with a compiled op)."""
        return "all"

    def init_device(self) -> None:
        """Upstream's, then the lockstep among the DP ranks that share experts."""
        super().init_device()
        self.lockstep = Lockstep.of(self.parallel_config)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """(blocks, 0): VLLM_CPU_KVCACHE_SPACE, but no more than all sequences that may run at once can fill."""
        allowed, _ = super().determine_num_available_blocks()
        per_sequence = -(-self.model_config.max_model_len // self.cache_config.block_size)
        useful = self.scheduler_config.max_num_seqs * per_sequence
        return min(allowed, useful + useful // 50 + 1), 0  # the scheduler keeps 1% free before it admits a prompt

    def execute_model(self, execute_model_req: ExecuteModelRequest | None = None):
        """Upstream's, after telling the DP ranks that share experts that this rank still works."""
        if self.lockstep is not None and execute_model_req is not None:
            self.lockstep.someone_works(here=True)
        return super().execute_model(execute_model_req)

    def keep_stepping(self) -> None:
        """Take part in the other DP ranks' steps, with a batch of one unused token, until all of them have finished."""
        steps = 0
        while self.lockstep.someone_works(here=False):
            super().execute_model(self._dummy_request())
            steps += 1
        log.debug("DP rank %d ran %d dummy steps", self.parallel_config.data_parallel_rank, steps)

    def _dummy_request(self) -> ExecuteModelRequest:
        """One prompt of one token without cache slots, greedy (so no random number is drawn), its output unused."""
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
