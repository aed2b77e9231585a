"""Keep vLLM's V0 engines of one data-parallel group in step. CPU only: V1 (which production runs) has this itself.

Experts are split over the DP ranks, so every forward pass is a collective: a rank that has finished its sequences must
go on taking part. V1 does it in `LLMEngine.has_unfinished_requests_dp` and `execute_dummy_batch`; V0 does not know of
it. Here:

    rank with work      before each forward pass: vote "working"            -> pass
    rank without work   vote "finished" -> someone works: dummy pass, again -> all finished: leave `generate`

so a pass happens on all ranks or on none, whatever each engine's scheduler decides in between.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

STALL_S = 600.0  # a rank that waits this long for the others' vote gives up, with a message instead of a hang


class Lockstep:
    """The votes of one DP group. Collective: each `someone_works` must be matched by one on every rank of the group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int):
        self.group, self.rank, self.size = group, rank, size

    @classmethod
    def of(cls, parallel_config) -> Lockstep | None:
        """The lockstep of this rank's DP group, after vLLM's groups exist; None without data parallelism.

        Raises RuntimeError if vLLM built its groups without data parallelism before this engine asked for it.
        """
        size = parallel_config.data_parallel_size
        if size == 1:
            return None
        from vllm.distributed import get_dp_group

        dp = get_dp_group()
        if dp.world_size != size:
            raise RuntimeError(
                f"vLLM's DP group has {dp.world_size} rank(s), the engine wants data_parallel_size={size}: groups are "
                "built once a process, by the first engine. Build the data-parallel engine first, or in its own process"
            )
        return cls(dp.cpu_group, dp.rank_in_group, size)

    def someone_works(self, here: bool) -> bool:
        """Vote, and learn whether any rank of the group (this one included) is about to run a forward pass.

        Raises RuntimeError if another rank does not vote within STALL_S seconds, or has gone.
        """
        vote = torch.tensor([int(here)], dtype=torch.int32)
        try:
            work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            work.wait(datetime.timedelta(seconds=STALL_S))
        except RuntimeError as error:
            state = "has sequences to generate" if here else "has finished"
            raise RuntimeError(
                f"rollout DP rank {self.rank} of {self.size} {state}, but another rank of its group did not take part "
                f"in the next step within {STALL_S:g} s. Ranks that share experts must call generate() equally often; "
                "look for the first error among the other ranks' logs, or for row platform.vllm_dp_lockstep being off"
            ) from error
        return bool(vote.item())


def drain_after_run(original: Callable) -> Callable:
    """`LLM._run_engine` that, its own requests done, goes on stepping until every DP rank has finished (V0 engines)."""

    @functools.wraps(original)
    def _run_engine(self, **kwargs):
        outputs = original(self, **kwargs)
        worker = getattr(getattr(self.llm_engine, "model_executor", None), "driver_worker", None)
        if getattr(worker, "lockstep", None) is not None:
            worker.keep_stepping()
        return outputs

    return _run_engine
