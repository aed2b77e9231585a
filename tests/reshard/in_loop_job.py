"""Run syncs between memory of a tiny model on ranks, with one error in them, to test reshard/weight_sync.py.

Only Megatron, vLLM and verl are replaced: training memory is cases.py's, the engine is a module whose load_weights
works as vLLM's does, and two functions of verl are stand-ins that record their calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tests.layout.native_parameters import part
from tests.reshard.cases import FIRST, Case, add_parameters, full_tensor, rollout_memory, train_memory
from tests.reshard.spoilt import error_message
from verl_patches.patching.row import make_subclass
from verl_patches.reshard import weight_sync
from verl_patches.reshard.destination import RolloutTensor
from verl_patches.worker import sharding
from verl_patches.worker.context import WorkerContext
from verl_patches.worker.sharding import RecipeShardingManager

BROKEN_RANK = 1


class Engine(torch.nn.Module):
    """Hold a rollout model in the memory of `case`, whose load_weights writes vocabulary padding too, as zeros."""

    def __init__(self, case: Case, rank: int):
        super().__init__()
        self.case = case
        self.places, live = rollout_memory(case, rank)
        add_parameters(self, live)

    def view(self, place: RolloutTensor) -> torch.Tensor:
        """Return the place in the parameter's present memory."""
        old = place.tensor
        return self.get_parameter(place.parameter).data.as_strided(old.shape, old.stride(), old.storage_offset())

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load in one pass, in the given order."""
        for name, whole in weights:
            for place in self.places.get(name, ()):
                values = part(whole, place.region)
                self.view(place).copy_(values)
                if name in (FIRST, "lm_head.weight"):
                    self.get_parameter(name).data[len(values) :].fill_(0)

    def move(self) -> None:
        """Move all parameters to other memory; the old one stays allocated, so that no other tensor gets it."""
        self.old = [parameter.data for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()

    def wrong(self, seed: int) -> list[str]:
        """Return HF tensors whose places are not bit-equal to the values of `seed`; padding must be zero."""
        wrong = []
        for name, places in self.places.items():
            for place in places:
                view = self.view(place)
                expected = part(full_tensor(self.case, name, seed), place.region).to(view.dtype)
                padding = self.get_parameter(place.parameter).data[len(view) :] if name == FIRST else torch.zeros(1)
                if not torch.equal(expected, view) or padding.any():
                    wrong.append(name)
        return wrong


class Upstream:
    """Stand in for verl's sharding manager below ours."""

    def __enter__(self) -> None:
        raise AssertionError("verl's own path was taken")


class Sync(NamedTuple):
    """Hold one sync's message, HF tensors with wrong values, and report (None if it raised)."""

    message: str
    wrong: list[str]
    report: dict[str, Any]


class World:
    """Hold one rank's training, engine and sharding manager; `spoilt` is the step that raises on BROKEN_RANK."""

    def __init__(self, case: Case, verify: str):
        self.case, self.rank, self.spoilt = case, dist.get_rank(), None
        self.sources, self.trained_is_valid = train_memory(case, self.rank), True
        self.engine = Engine(case, self.rank)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self.engine))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=runner))
        config = {"model_type": "deepseek_v3", **vars(replace(case.model, torch_dtype="float32"))}
        self.manager = make_subclass(Upstream, RecipeShardingManager)()
        reshard = SimpleNamespace(bucket_bytes=case.bucket_bytes, verify=verify)
        recipe = SimpleNamespace(reshard=reshard, weight_sync=SimpleNamespace(enabled=True))
        layouts = {"train": case.train, "rollout": case.rollout, "rollout_library": case.rollout_library}
        layouts["train_library"] = case.train_library
        vars(self.manager).update(
            run_spec=SimpleNamespace(line="pypi", recipe=recipe, **layouts),
            actor_module=[torch.nn.Linear(1, 1, dtype=getattr(torch, case.model.torch_dtype))],
            model_config=SimpleNamespace(to_dict=lambda: config),
            inference_engine=SimpleNamespace(
                wake_up=lambda tags: self.step(f"wake {tags}"),
                mark_weights_written=lambda last: None,
                llm_engine=SimpleNamespace(model_executor=executor),
            ),
        )

    def step(self, name: str) -> None:
        """Raise if the step is the spoilt one."""
        if self.spoilt and name.startswith(self.spoilt) and self.rank == BROKEN_RANK:
            raise OSError(f"broken {self.spoilt}")

    def sync(self, seed: int) -> Sync:
        """Change all training weights in place, and sync by verl's call."""
        for name, source in self.sources.items():
            source.tensor.copy_(part(full_tensor(self.case, name, seed), source.region))
        error = error_message(self.manager.__enter__)
        (report,) = self.manager.resharder.take_reports() if error == "fine" else [{}]
        return Sync(error, self.engine.wrong(seed), report)

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[World]:
        """Give weight_sync.py this world's memory in place of Megatron's, and stand-ins for verl's functions."""
        verl_utils = ModuleType("verl.utils.vllm_utils")
        verl_utils.patch_vllm_moe_model_weight_loader = lambda model: None

        def spoil(holder: Any, attribute: str, name: str) -> Any:
            original: Callable = getattr(holder, attribute)

            def call(*args, **kwargs):
                self.step(name)
                return original(*args, **kwargs)

            return mock.patch.object(holder, attribute, call)

        with (
            mock.patch.object(sharding, "is_on", lambda row: True),
            mock.patch.object(sharding, "context", lambda: WorkerContext(scheduler=object())),
            mock.patch.dict(sys.modules, {"verl.utils.vllm_utils": verl_utils}),
            mock.patch.object(weight_sync, "train_tensors", lambda *args: self.sources),
            mock.patch.object(weight_sync, "views_are_valid", lambda *args: self.trained_is_valid),
            spoil(weight_sync, "plan_reshard", "plan"),
            spoil(weight_sync, "post_load", "post_load"),
            spoil(weight_sync.Verifier, "poison", "poison"),
            spoil(weight_sync, "learn_destinations", "learn"),
        ):
            yield self


def run_syncs(case: Case, verify: str, moved: str, step: str = "", number: int = 0) -> list[Sync]:
    """Run three syncs; before each the rollout's memory has lost its values, as after sleep.

    `moved`: before the second sync the rollout memory of "all" ranks, or the "rollout" or "training" memory of one,
    moves. `step`: the step that raises on one rank in sync `number`.
    """
    results = []
    with World(case, verify).stand_ins() as world:
        one = world.rank == BROKEN_RANK
        for seed in (1, 2, 3):
            world.spoilt, world.trained_is_valid = step if seed == number else None, True
            for parameter in world.engine.parameters():
                parameter.data.fill_(float("nan"))
            if seed == 2 and (moved == "all" or moved == "rollout" and one):
                world.engine.move()
            elif seed == 2 and moved == "training" and one:
                world.sources, world.trained_is_valid = train_memory(case, world.rank), False
            results.append(world.sync(seed))
        return results
