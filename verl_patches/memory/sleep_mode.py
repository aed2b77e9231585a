"""Free the weights and KV cache of verl's in-process vLLM engine between two rollouts (sleep and wake-up).

`SleepMode` (row memory.sleep_mode) replaces vLLM's sleep mode. It resizes storages to 0 and back, without a copy to the
host; tensors stay views of the same storages, at other addresses after wake-up. Graphs then read addresses at each call
(row memory.graph_addresses). With the row off vLLM's own sleep mode copies all weights to the host and back, at the
addresses that graphs captured.
- weights: parameters and MLA's absorbed projections. After wake-up their contents are undefined, and requests are
  refused until a weight sync has written them. They stay on the device if no sync replaces them: weights that the
  engine loaded itself until the first sync (load_format=dummy loads none), those of the only sync
  (recipe.weight_sync.enabled=false), and on verl's own sync path (row reshard.direct off), which does not prove that it
  writes every weight.
- kv_cache: comes back with as many blocks of the same size, set to zero.
Buffers (rotary tables, expert maps) stay on the device, as does a weight that shares a buffer's memory or has a private
NPU format, whose storage torch_npu does not resize (ResizeNpu.h).

`require_freed_memory` ends the run where the driver's figures show that the memory is not free after sleep.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from verl_patches.errors import RecipeError
from verl_patches.memory.host_backed import HostBackedStorage
from verl_patches.memory.live_memory import ABSORBED_PROJECTIONS, private_format, storage_id
from verl_patches.memory.measure import kv_caches, tensors_in, vllm_worker

WEIGHTS, CACHE = TAGS = ("weights", "kv_cache")  # vLLM's tags of LLM.wake_up
Tensors = dict[str, torch.Tensor]
# Share of the expected bytes that may be missing. A tensor that stays keeps its segment of torch's allocator: 20 MB, or
# 2 MB for one below 1 MB (kLargeBuffer, kSmallBuffer); buffers and expert maps of all layers may keep some hundred MB.
# At 671B the share is 2.6 GB, and weights or KV cache that stay are 20 GB and more.
MISSING_SHARE = 0.05


class SleepMode:
    """Put one engine, `llm`, to sleep and wake it up by resizing storages; both are idempotent.

    `loaded`: sleep must keep the weights until a sync reports that it wrote them (`mark_weights_written`), because the
    engine has loaded valid ones, or because no sync will report it.
    """

    def __init__(self, llm: Any, loaded: bool = True):
        self._llm = llm
        self._keep_weights, self._weights_invalid = loaded, False
        self._asleep: dict[str, dict[str, HostBackedStorage]] = {}

    def mark_weights_written(self, last: bool = False) -> None:
        """Note that a weight sync has written every weight; after the `last` sync sleep must keep them."""
        self._keep_weights, self._weights_invalid = last, False

    def check_ready(self) -> None:
        """Raise RecipeError if a tag is asleep, or the weights have not been written since sleep freed them."""
        if self._asleep:
            raise RecipeError(
                f"rollout: {' and '.join(sorted(self._asleep))} of the engine are asleep (freed by sleep()): "
                "call LLM.wake_up() before generate()"
            )
        if self._weights_invalid:
            raise RecipeError(
                "rollout: weights were freed by sleep() and no weight sync has written them since; "
                "enter verl's sharding manager before generate()"
            )

    def sleep(self, level: int = 1) -> None:
        """Reset the prefix cache and free the memory; `level` is vLLM's and is not used.

        Raises RecipeError if the cache is in use, or not found.
        """
        if CACHE not in self._asleep:
            self._reset_prefix_cache()
            self._free_tag(CACHE)
        if WEIGHTS not in self._asleep and not self._keep_weights:
            self._weights_invalid = True
            self._free_tag(WEIGHTS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the memory of all or of vLLM's `tags`; a storage that was replaced or resized raises RecipeError."""
        for tag in [tag for tag in TAGS if tag in self._asleep and (tags is None or tag in tags)]:
            tensors = self._tensors(tag)
            for name, storage in self._asleep[tag].items():
                storage.check(tensors[name])
            for storage in dict.fromkeys(self._asleep[tag].values()):
                storage.allocate()
                if tag == CACHE:
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage.storage).zero_()
            del self._asleep[tag]

    def _reset_prefix_cache(self) -> None:
        engine = self._llm.llm_engine  # both methods exist in engines V0 and V1
        if unfinished := engine.get_num_unfinished_requests():
            raise RecipeError(
                f"rollout: sleep() with {unfinished} unfinished requests, expected 0: their KV cache would be lost; "
                "finish or abort them first"
            )
        done = engine.reset_prefix_cache()
        if done is None:  # engine V1 does not return its block pool's result
            pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
            done = pool.num_gpu_blocks - pool.get_num_free_blocks() == 1  # only the null block is in use
        if not done:
            raise RecipeError(
                "rollout: sleep(): vLLM cannot reset its prefix cache: expected no block in use after the last "
                "request, found some; finish or abort all requests first"
            )

    def _free_tag(self, tag: str) -> None:
        asleep, by_storage = {}, dict[int, HostBackedStorage]()
        for name, tensor in self._tensors(tag).items():
            asleep[name] = by_storage.setdefault(tensor.untyped_storage()._cdata, HostBackedStorage(name, tensor))
        for storage in by_storage.values():
            storage.offload(copy=False)
        self._asleep[tag] = asleep

    def _tensors(self, tag: str) -> Tensors:
        if tag == CACHE:
            if not (caches := kv_caches(self._llm)):
                raise RecipeError(
                    "rollout: sleep(): expected a KV cache in the engine's model runner or worker, found none"
                )
            return {f"kv_cache[{i}]": tensor for i, tensor in enumerate(tensors_in(caches))}
        return freeable_weights(vllm_worker(self._llm).model_runner.model)


def freeable_weights(model: torch.nn.Module) -> Tensors:
    """Return {name: tensor} of vLLM's `model` that a weight sync writes or derives, and whose memory nothing else uses.

    Leaves out tensors of `all_weights` that share memory with a buffer or have a private NPU format.
    """
    weights = all_weights(model)
    stay = {storage_id(buffer) for buffer in model.buffers()}
    stay |= {storage_id(tensor) for tensor in weights.values() if private_format(tensor) is not None}
    return {name: tensor for name, tensor in weights.items() if storage_id(tensor) not in stay}


def all_weights(model: torch.nn.Module) -> Tensors:
    """Return parameters of vLLM's `model` by name, and each layer's absorbed projections as `<layer>.impl.W_UV`.

    Several may share a storage: vLLM's own projections are views of kv_b_proj
    (vllm.attention.backends.mla.common.MLACommonImpl.process_weights_after_loading).
    """
    weights = dict(model.named_parameters())
    for layer, module in model.named_modules():
        impl = vars(module).get("impl")
        derived = [key for key in ABSORBED_PROJECTIONS if impl and key in vars(impl)]
        weights |= {f"{layer}.impl.{key}": vars(impl)[key] for key in derived}
    return weights


@contextlib.contextmanager
def require_freed_memory(device: Any, held_bytes: Callable[[], dict[str, int]], by_vllm: bool) -> Iterator[None]:
    """Check that the device has more free memory after the code inside, which puts an engine to sleep.

    The code inside also returns the cached memory of torch's allocator. `held_bytes` returns {memory group: bytes that
    it holds now}; `by_vllm`: whether vLLM's own sleep mode frees. Raises RecipeError unless the driver's figure for
    free memory of `device` (torch.npu) has grown by the bytes that groups and cache gave up, or MISSING_SHARE less.
    """
    before, (free_before, _), cached = held_bytes(), device.mem_get_info(), _cached_bytes(device)
    yield
    after, (free_after, _) = held_bytes(), device.mem_get_info()
    given_up = {group: held - after[group] for group, held in before.items() if held > after[group]}
    freed = sum(given_up.values())
    expected = freed + max(0, cached - _cached_bytes(device))
    if not freed or free_after - free_before >= expected - MISSING_SHARE * freed:
        return
    conf = os.environ.get("PYTORCH_NPU_ALLOC_CONF")
    todo = "switch row memory.sleep_mode on: vLLM's sleep mode may free nothing on several nodes"
    if not by_vllm:
        todo = (
            f"expected PYTORCH_NPU_ALLOC_CONF=expandable_segments:True, found {conf}: without expandable segments, "
            "tensors that stay keep whole segments of torch's allocator; or end other processes that use this device"
        )
    raise RecipeError(
        f"rollout, rank {torch.distributed.get_rank()}: expected {expected:,} bytes more free memory on the device "
        f"after sleep, or {MISSING_SHARE:.0%} less ({', '.join(f'{name} {size:,}' for name, size in given_up.items())}"
        f", torch's cache {expected - freed:,}); found {free_after - free_before:,} ({free_before:,} free before, "
        f"{free_after:,} after). {todo} (docs/the-step.md)"
    )


def _cached_bytes(device: Any) -> int:
    return device.memory_reserved() - device.memory_allocated()
