"""Weights and KV cache of verl's in-process vLLM between two rollouts: sleep and wake-up.

ResizeSleepMode (enforce_eager=true) replaces vLLM's sleep mode. Asleep, storages are placeholders of no bytes: every
view stays what it is (layers, runner, the weight sync's) and nothing is copied to the host. Awake, they have as many
bytes again, at other addresses:
- weights: parameters and what is derived from them (MLA's absorbed projections), contents undefined until a weight sync
  has written them; a request before that is refused. Weights that the engine loaded itself stay until the first sync
  (load_format=dummy has loaded none), and those of the last sync (recipe.weight_sync.enabled=false) stay for good. So
  do all weights on verl's own path (row reshard.direct off): nothing proves that it writes every weight.
- kv_cache: as many blocks of the same size, zero.
Buffers (rotary tables, expert maps) stay, and what shares their memory, and what has a private NPU format, whose
storage torch_npu does not resize (ResizeNpu.h).

CumemSleepMode (enforce_eager=false) keeps vLLM's sleep mode, without its host copy of what the next weight sync writes:
captured graphs use fixed addresses (torchair: frozen_parameter, vllm_ascend model_runner_v1.py:1774), and only vLLM's
sleep mode restores memory at those. It moves whole segments of torch's allocator. A segment in which every living
tensor is such a weight is released without a copy, as those of the KV cache are; all others are copied: buffers, expert
maps, private NPU formats, and what a weight shares with them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from verl_patches.errors import RecipeError
from verl_patches.memory.host_backed import HostBackedStorage, unique
from verl_patches.memory.measure import kv_caches, tensors_in, vllm_worker
from verl_patches.reshard.live_memory import ABSORBED, private_format, storage_id

WEIGHTS, CACHE = TAGS = ("weights", "kv_cache")  # vLLM's tags of LLM.wake_up
Tensors = dict[str, torch.Tensor]


class SleepMode:
    """Whether an engine's weights are loaded and valid.

    `loaded`: they are valid before a first sync, or no sync will report that it has written them (`weights_written`).
    """

    _asleep: Collection[str]  # vLLM's tags

    def __init__(self, loaded: bool):
        self._weights_stay, self._lost = loaded, False

    def weights_written(self, last: bool = False) -> None:
        """A weight sync has written every weight; `last`: no other sync comes, so they have to survive sleep."""
        self._weights_stay, self._lost = last, False

    def check_ready(self) -> None:
        """RecipeError if a tag is asleep, or the weights have not been written since sleep freed them."""
        if self._asleep:
            raise RecipeError(
                f"rollout: {' and '.join(sorted(self._asleep))} of the engine are asleep: call "
                "LLM.wake_up before generate()"
            )
        if self._lost:
            raise RecipeError(
                "rollout: weights were freed by sleep() and no weight sync has written them since; "
                "enter verl's sharding manager before generate()"
            )


class ResizeSleepMode(SleepMode):
    """Sleep and wake-up of one engine, `llm`; see the head of this file. Both are idempotent."""

    def __init__(self, llm: Any, loaded: bool = True):
        super().__init__(loaded)
        self._llm = llm
        self._asleep: dict[str, dict[str, HostBackedStorage]] = {}
        self._cache: dict[str, int] = {}  # as it was built: number of blocks, bytes of each tensor

    def sleep(self, level: int = 1) -> None:
        """Free the memory; `level` is vLLM's and is not used.

        RecipeError if the cache is not as built, or in use: the prefix cache is reset here.
        """
        if CACHE not in self._asleep:
            self._reset_prefix_cache()
            self._check_cache()
            self._free(CACHE)
        if WEIGHTS not in self._asleep and not self._weights_stay:
            self._lost = True
            self._free(WEIGHTS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the memory again, of all or of vLLM's `tags`. RecipeError if a tensor has another storage."""
        for tag in [tag for tag in TAGS if tag in self._asleep and (tags is None or tag in tags)]:
            now = self._tensors(tag)
            for name, storage in self._asleep[tag].items():
                if name not in now or now[name].untyped_storage()._cdata != storage.storage._cdata:
                    raise RecipeError(
                        f"rollout: {name}: expected the storage with which the engine went to sleep, "
                        f"found {'another' if name in now else 'no such tensor'}"
                    )
                storage.check(now[name])
            for storage in unique(self._asleep[tag].values()):
                storage.allocate()
                if tag == CACHE:
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage.storage).zero_()
            del self._asleep[tag]
            if tag == CACHE:
                self._check_cache()

    def _reset_prefix_cache(self) -> None:
        engine = self._llm.llm_engine  # these two have one name in engines V0 and V1
        unfinished = engine.get_num_unfinished_requests()
        if unfinished:
            raise RecipeError(
                f"rollout: sleep() with {unfinished} unfinished requests, whose blocks would be "
                "lost; expected 0: finish or abort them first"
            )
        if engine.reset_prefix_cache() is False:  # V1 says nothing
            raise RecipeError(
                "rollout: vLLM cannot reset its prefix cache before sleep: some blocks are in use, "
                "expected none after the last request"
            )

    def _free(self, tag: str) -> None:
        asleep, by_storage = {}, {}
        for name, tensor in self._tensors(tag).items():
            asleep[name] = by_storage.setdefault(tensor.untyped_storage()._cdata, HostBackedStorage(name, tensor))
        for storage in by_storage.values():
            storage.offload(copy=False)
        self._asleep[tag] = asleep

    def _tensors(self, tag: str) -> Tensors:
        if tag == CACHE:
            return {f"kv_cache[{i}]": each for i, each in enumerate(tensors_in(kv_caches(self._llm)))}
        return weights_of(vllm_worker(self._llm).model_runner.model)

    def _check_cache(self) -> None:
        found = {"blocks": self._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}
        found |= {name: tensor.untyped_storage().nbytes() for name, tensor in self._tensors(CACHE).items()}
        if len(found) == 1:
            raise RecipeError("rollout: expected the engine's KV cache in its model runner or worker, found none")
        self._cache = self._cache or found
        for name in [*self._cache, *(name for name in found if name not in self._cache)]:
            if self._cache.get(name) != found.get(name):
                what = "blocks of KV cache" if name == "blocks" else f"{name} in bytes"
                raise RecipeError(
                    f"rollout: {what}: expected {self._cache.get(name)} as the engine was built, found "
                    f"{found.get(name)}: the cache was rebuilt outside this class"
                )


def weights_of(model: torch.nn.Module) -> Tensors:
    """Tensors of vLLM's `model` that a weight sync fills or derives anew, by name, where their memory is theirs alone.

    What has to stay is left out of `all_weights`: what buffers share, and private NPU formats.
    """
    found = all_weights(model)
    stay = {storage_id(buffer) for buffer in model.buffers()}
    stay |= {storage_id(each) for each in found.values() if private_format(each) is not None}
    return {name: each for name, each in found.items() if storage_id(each) not in stay}


def all_weights(model: torch.nn.Module) -> Tensors:
    """Each parameter of vLLM's `model`, and each layer's absorbed projections as `<layer>.impl.W_UV`, by name.

    Several may share one storage: projections that are views of kv_b_proj (vLLM's own, mla/common.py:1162) share its.
    """
    found = dict(model.named_parameters())
    for layer, module in model.named_modules():
        impl = vars(module).get("impl")
        found |= {f"{layer}.impl.{key}": vars(impl)[key] for key in ABSORBED if impl and key in vars(impl)}
    return found


_ALLOCATORS = (
    ("vllm_ascend.device_allocator.camem", "CaMemAllocator"),
    ("vllm.device_allocator.cumem", "CuMemAllocator"),
)
_DROPPED = "weights that the next sync writes"  # sleep copies what has the tag `weights` only


class CumemSleepMode(SleepMode):
    """Sleep and wake-up of one engine, `llm`, by vLLM's sleep mode; see the head of this file.

    Both are idempotent: vLLM's executor ignores calls while only one of its tags is awake.
    """

    def __init__(self, llm: Any, loaded: bool = True):
        super().__init__(loaded)
        self._llm = llm
        self._sleep, self._wake_up = llm.llm_engine.sleep, llm.llm_engine.wake_up
        self._asleep: set[str] = set()

    def sleep(self, level: int = 1) -> None:
        """vLLM's own. RecipeError if its allocator is not there."""
        if self._asleep == set(TAGS):
            return
        self.wake_up()
        drop = level != 1 or not self._weights_stay
        pieces, addresses = (_allocator().pointer_to_data, self._weight_segments()) if drop else ({}, ())
        self._asleep, self._lost = set(TAGS), drop  # set before: after an error the contents are unknown
        with dropped(pieces, addresses):
            self._sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's own, of all or of vLLM's `tags`."""
        wanted = [tag for tag in TAGS if tag in self._asleep and (tags is None or tag in tags)]
        if wanted:
            self._wake_up(wanted)
            self._asleep -= set(wanted)

    def _weight_segments(self) -> set[int]:
        weights = weights_of(vllm_worker(self._llm).model_runner.model).values()
        addresses = {weight.untyped_storage().data_ptr() for weight in weights}
        return segments_of(_snapshot(next(iter(weights)).device), addresses)


def segments_of(snapshot: Iterable[Mapping[str, Any]], tensors: Collection[int]) -> set[int]:
    """Addresses of the segments in which nothing lives but `tensors`, addresses too.

    `snapshot`: torch's memory_snapshot. What is free but waits for a stream counts as living.
    """
    return {
        segment["address"]
        for segment in snapshot
        if {block["address"] for block in segment["blocks"] if block["state"] != "inactive"} <= set(tensors)
    }


@contextlib.contextmanager
def dropped(pieces: Mapping[int, Any], addresses: Collection[int]) -> Iterator[None]:
    """Meanwhile the `pieces` (vLLM's AllocationData by address) of weights at `addresses` are not copied by sleep."""
    ours = [piece for address, piece in pieces.items() if address in addresses and piece.tag == WEIGHTS]
    for piece in ours:
        piece.tag = _DROPPED
    try:
        yield
    finally:
        for piece in ours:
            piece.tag = WEIGHTS


def _snapshot(device: torch.device) -> Iterable[Mapping[str, Any]]:
    module = torch.get_device_module(device.type)
    module.synchronize()  # vLLM unmaps without waiting; where it copies nothing, that does not wait either
    return module.memory_snapshot()


def _allocator() -> Any:
    for module, name in _ALLOCATORS:
        found = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        if found is not None:
            return found
    raise RecipeError(
        f"rollout: sleep() needs {' or '.join(name for _, name in _ALLOCATORS)} of vLLM's "
        "sleep mode, found neither: switch the row off, recipe.patches=[-memory.sleep_mode]"
    )
