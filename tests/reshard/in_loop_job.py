"""What a rank does in tests of reshard/weight_sync.py: syncs between memory of a tiny model, with something spoilt.

Real is all but what needs Megatron, vLLM or verl: training memory is cases.py's, the engine is a module whose
load_weights works as vLLM's does, and verl's two functions are stand-ins that say when they were called.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.reshard.cases import Case, Live, cut, full_tensor, grow, rollout_memory, train_memory
from tests.reshard.spoilt import message
from verl_patches.layout.sharding import local_parameters
from verl_patches.patching.row import subclass_of
from verl_patches.reshard import destination, weight_sync
from verl_patches.worker import sharding
from verl_patches.worker.context import WorkerContext
from verl_patches.worker.sharding import RecipeShardingManager

BROKEN_RANK = 1
FIRST = "model.embed_tokens.weight"


class Engine(torch.nn.Module):
    """A rollout model in the memory of `case`. Its load_weights writes padding of the vocabulary too, as zeros.

    `strange`: HF tensors on which it computes something, so that they cannot be mapped. `loaded`: what it loaded.
    """

    def __init__(self, case: Case, rank: int, strange: tuple[str, ...] = ()):
        super().__init__()
        self.case, self.strange, self.loaded = case, strange, []
        self.places, live = rollout_memory(case, rank)
        grow(self, live)

    def view(self, place: Live) -> torch.Tensor:
        """The place in the parameter's present memory."""
        old = place.tensor
        return self.get_parameter(place.parameter).data.as_strided(old.shape, old.stride(), old.storage_offset())

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """One pass, in the order given."""
        for name, whole in weights:
            for place in self.places.get(name, ()):
                self.loaded.append(name)
                region = place.region
                part = whole.narrow(region.axis, region.start, region.stop - region.start)
                self.view(place).copy_(part * 1 if name in self.strange else part)
                if name in (FIRST, "lm_head.weight"):
                    self.get_parameter(name).data[len(part) :].fill_(0)

    def move(self) -> None:
        """All parameters get other memory; what was theirs is kept, so that it is not given to others."""
        self.old = [parameter.data for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()

    def wrong(self, seed: int) -> list[str]:
        """HF tensors whose places do not have, bit for bit, the values of `seed`; padding must be zero."""
        parameters, found = self.case.inventory.by_name, []
        for name, places in self.places.items():
            whole = full_tensor(name, parameters[name].shape, parameters[name].dtype, seed)
            for place in places:
                region, view = place.region, self.view(place)
                expected = whole.narrow(region.axis, region.start, region.stop - region.start).to(view.dtype)
                rest = self.get_parameter(place.parameter).data[len(view) :] if name == FIRST else torch.zeros(1)
                if not torch.equal(expected, view) or rest.any():
                    found.append(name)
        return found


class Upstream:
    """Stands for verl's sharding manager below ours."""

    def __enter__(self) -> None:
        raise AssertionError("verl's own path was taken")


@dataclass
class Spoilt:
    """What goes wrong on one rank, while `now`: learn, plan, post_load, wake_up or poison."""

    what: str = ""
    now: bool = False

    def __call__(self, what: str) -> None:
        """Raise, if it is this and this rank."""
        if self.now and what == self.what and dist.get_rank() == BROKEN_RANK:
            raise OSError(f"broken {what}")


class World:
    """One rank: training, engine and verl's sharding manager. Use it inside `stand_ins`."""

    def __init__(self, case: Case, verify: str, strange: tuple[str, ...] = ()):
        self.case, self.rank, self.events, self.spoilt = case, dist.get_rank(), [], Spoilt()
        self.sources, self.trained_is_valid = train_memory(case, self.rank), True
        self.engine = Engine(case, self.rank, strange)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self.engine))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=runner))
        config = {"model_type": "deepseek_v3", **vars(replace(case.model, torch_dtype="float32"))}
        self.manager = subclass_of(Upstream, RecipeShardingManager)()
        vars(self.manager).update(
            settings=weight_sync.Settings(case.train, case.rollout, "pypi", case.bucket_bytes, verify),
            actor_module=[torch.nn.Linear(1, 1, dtype=getattr(torch, case.model.torch_dtype))],
            model_config=SimpleNamespace(to_dict=lambda: config),
            inference_engine=SimpleNamespace(
                wake_up=self._wake_up,
                weights_written=lambda last: None,
                llm_engine=SimpleNamespace(model_executor=executor),
            ),
        )

    def train(self, seed: int) -> None:
        """Training changes all weights, in place."""
        shards = local_parameters(self.case.inventory, self.case.train, self.rank, self.case.train_library).shards
        for name, shard in shards.items():
            whole = full_tensor(name, shard.parameter.shape, shard.parameter.dtype, seed)
            self.sources[name].tensor.copy_(cut(shard, whole))

    def sync(self) -> str:
        """One sync as verl calls it: what it raises, or "fine"."""
        return message(self.manager.__enter__)

    def facts(self) -> dict[str, Any]:
        """What the last sync reported; nothing, if it raised."""
        reports = self.manager.resharder.take_reports()
        assert len(reports) <= 1
        return reports[0] if reports else {}

    def _wake_up(self, tags: list[str]) -> None:
        self.events.append(f"wake {tags}")
        self.spoilt("wake_up")

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[World]:
        """Meanwhile in_loop.py meets this world's memory where it would ask Megatron, and verl's functions here."""
        verl_utils = ModuleType("verl.utils.vllm_utils")
        verl_utils.patch_vllm_moe_model_weight_loader = lambda model: self.events.append("loaders")
        covers, poison = destination.Destinations.check_covers, weight_sync.Verifier.poison
        plan, after = weight_sync.plan_reshard, weight_sync.post_load

        def spoil(what: str, original: Callable) -> Callable:
            def call(*args, **kwargs):
                self.events.append(what)
                self.spoilt(what)
                return original(*args, **kwargs)

            return call

        with (
            mock.patch.object(sharding, "is_on", lambda row: True),
            mock.patch.object(sharding, "context", lambda: WorkerContext(scheduler=object())),
            mock.patch.dict(sys.modules, {"verl.utils.vllm_utils": verl_utils}),
            mock.patch.object(weight_sync, "train_tensors", lambda *args: self.sources),
            mock.patch.object(weight_sync, "still_valid", lambda *args: self.trained_is_valid),
            mock.patch.object(weight_sync, "plan_reshard", spoil("plan", plan)),
            mock.patch.object(weight_sync, "post_load", spoil("post_load", after)),
            mock.patch.object(weight_sync.Verifier, "poison", spoil("poison", poison)),
            mock.patch.object(destination.Destinations, "check_covers", spoil("learn", covers)),
        ):
            yield self


def syncs(case: Case, verify: str, count: int, strange_on: int | None = None) -> list[tuple]:
    """`count` syncs, training in between: (message, wrong tensors, facts, what load_weights was given whole) of each.

    Before each the rollout's memory has lost what it held, padding too, as after sleep.
    `strange_on`: the rank whose engine keeps FIRST from being mapped.
    """
    found = []
    with World(case, verify, (FIRST,) * (dist.get_rank() == strange_on)).stand_ins() as world:
        for seed in range(1, count + 1):
            world.train(seed)
            for parameter in world.engine.parameters():
                parameter.data.fill_(float("nan"))
            world.engine.loaded.clear()
            said = world.sync()
            found.append((said, world.engine.wrong(seed), world.facts(), list(world.engine.loaded)))
    return found


def moved(case: Case, side: str) -> list[tuple]:
    """As `syncs`, of three syncs; before the second one rank's rollout (or training) memory moves."""
    found = []
    with World(case, "first").stand_ins() as world:
        for seed in (1, 2, 3):
            if seed == 2 and world.rank == BROKEN_RANK:
                if side == "rollout":
                    world.engine.move()
                else:
                    world.sources = train_memory(case, world.rank)
                    world.trained_is_valid = False
            world.train(seed)
            said = world.sync()
            world.trained_is_valid = True
            found.append((said, world.engine.wrong(seed), world.facts()))
    return found


def broken(case: Case, what: str, at: int) -> list[tuple]:
    """Sync number `at` of three has an error on one rank; before the second all rollout memory moves.

    (message, wrong tensors) of each.
    """
    found = []
    with World(case, "every").stand_ins() as world:
        for seed in (1, 2, 3):
            if seed == 2:
                world.engine.move()
            world.spoilt = Spoilt(what, now=seed == at)
            world.train(seed)
            found.append((world.sync(), world.engine.wrong(seed)))
    return found


def with_cache(case: Case) -> list[str]:
    """What happens in which order in a first sync."""
    with World(case, "first").stand_ins() as world:
        assert world.sync() == "fine"
        return world.events
