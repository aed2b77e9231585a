"""Sync the weights of one worker: the first sync maps training and rollout memory, and every sync runs the plan.

This replaces verl's per-tensor generator and vLLM's load_weights (verl/workers/sharding_manager/megatron_vllm.py,
`__enter__`). Once a tensor of training or rollout lies in other memory, both are mapped again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.memory.live_memory import post_load
from verl_patches.reshard.destination import Destinations, learn_destinations
from verl_patches.reshard.execute import Executor, SyncReport, build_executor
from verl_patches.reshard.plan import ReshardPlan, plan_reshard
from verl_patches.reshard.rank_errors import catch_errors, raise_on_any_rank
from verl_patches.reshard.train_tensors import TrainTensor, train_tensors, trained_inventory, views_are_valid
from verl_patches.reshard.verify import Verifier, check_map
from verl_patches.spec import RunSpec

log = logging.getLogger(__name__)


class WorkerReshard:
    """Sync the weights of one worker of `run` from its Megatron `chunks` to vLLM's `model`; every worker has one.

    `reports` holds the report of each sync, oldest first, until `take_reports`.
    """

    def __init__(self, run: RunSpec, chunks: Sequence[torch.nn.Module], hf_config: Any, device: torch.device):
        self.run, self.chunks, self.device = run, chunks, device
        self.rank = dist.get_rank()
        self.inventory = trained_inventory(chunks, hf_config)
        self.sources: dict[str, TrainTensor] = {}
        self.destinations: Destinations  # `_map_moved_memory` sets it, and the plan
        self.plan: ReshardPlan
        self.executor: Executor | None = None
        self.verified, self.reports = False, list[dict[str, Any]]()

    def sync(self, model: torch.nn.Module) -> SyncReport:
        """Copy training's present weights into `model`; collective. An error raises ReshardError on every rank."""
        learnt = self._map_moved_memory(model)
        assert self.executor is not None  # `_map_moved_memory` has made it
        with torch.no_grad():
            for constant in self.destinations.constants:  # padding, undefined after a dummy load or sleep
                constant.target.fill_(constant.value)
        wanted = self.run.recipe.reshard.verify
        verify = wanted == "every" or (wanted == "first" and not self.verified)
        if verify:
            verifier = Verifier(self.plan, self.rank, self.sources, self.destinations.tensors, self.device)
            report = self.executor.run(before=verifier.poison)
            self._verify(verifier, model)
        else:
            report = self.executor.run()
        self.reports.append({**asdict(report), "verified": verify, "learnt": learnt})
        return report

    def _verify(self, verifier: Verifier, model: torch.nn.Module) -> None:
        elements = verifier.check()
        if not self.verified:  # not since the map was learnt
            shapes = {p.name: p.shape for p in self.inventory.parameters}
            problems = catch_errors(lambda: check_map(model, self.destinations.tensors, shapes, self.rank))
            raise_on_any_rank(problems, None, self.device, "vLLM's load_weights writes to other places")
        self.verified = True
        log.info("weight sync verified: %d regions, %d elements on this rank", len(verifier.regions), elements)

    def take_reports(self) -> list[dict[str, Any]]:
        """Return the reports of the syncs since the last call."""
        taken, self.reports = self.reports, []
        return taken

    def _map_moved_memory(self, model: torch.nn.Module) -> bool:
        """Map memory and compile the plan if any rank has new or moved memory, and return whether that was done."""
        valid = self.executor is not None and views_are_valid(self.sources, self.chunks)
        valid = valid and self.destinations.still_valid(model)
        flag = torch.tensor([int(valid)], device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        if flag.item():
            return False
        self.executor, self.verified = None, False  # after an error the old map must not be used
        log.info("weight sync: mapping the weights in training and in vLLM memory")

        def learn():
            self.sources = train_tensors(self.chunks, self.inventory, self.run.train, self.rank, self.run.train_library)
            self.destinations = learn_destinations(model, self.inventory, rank=self.rank)

        raise_on_any_rank(catch_errors(learn), None, self.device, "training or rollout weights cannot be mapped")
        raise_on_any_rank(catch_errors(self._make_plan), None, self.device, "no weight sync can be planned")
        self.executor = build_executor(
            self.plan,
            self.rank,
            self.sources,
            self.destinations.tensors,
            device=self.device,
            finish=functools.partial(post_load, model),
        )
        return True

    def _make_plan(self) -> None:
        self.plan = plan_reshard(
            self.inventory,
            self.run.train,
            self.run.rollout,
            train_library=self.run.train_library,
            rollout_library=self.run.rollout_library,
            bucket_bytes=self.run.recipe.reshard.bucket_bytes,
        )
