"""Weights and KV cache of verl's in-process vLLM between two rollouts, in place of vLLM's sleep mode.

Asleep, their storages are placeholders of no bytes: every view stays what it is (layers, runner, the weight sync's) and
nothing is copied to the host. Awake, they have as many bytes again, at other addresses:
- weights: parameters and what is derived from them (MLA's absorbed projections), contents undefined until a weight sync
  has filled them; generating before is refused. Those that the engine has loaded itself stay until the first sync
  (load_format=dummy has loaded none), and those of a sync after which none comes (recipe.weight_sync.enabled=false)
  stay for good. So do all on verl's own path (rows reshard.direct* off): nothing proves that it writes every weight.
- kv_cache: as many blocks of the same size, zero.
Buffers (rotary tables, expert maps) stay, and what shares their memory, and what has a private NPU format, whose
storage torch_npu does not resize (ResizeNpu.h).

An engine with captured graphs (enforce_eager=false) keeps vLLM's sleep mode: graph_life.py.

What the engine derives from its weights must be derived again when new ones have arrived (`post_load`). At our pins,
unquantised, that is MLA's absorbed projections alone. Other work of process_weights_after_loading changes how
parameters lie in memory, once (padding, axes: reshard/destination.py), and weights are written into that; quantised
methods compute other values from them, which a sync of plain weights cannot: `Destinations.check_covers` then finds
their scales unwritten.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from verl_patches.memory.measure import kv_caches, tensors_in, vllm_worker
from verl_patches.memory.parking import Parked, unique
from verl_patches.patching.engine import PatchError
from verl_patches.reshard.live_memory import private_format, storage_id

WEIGHTS, CACHE = TAGS = ("weights", "kv_cache")  # vLLM's tags of LLM.wake_up
ABSORBED = ("W_UV", "W_UK_T")  # vllm/attention/backends/mla/common.py:1115, vllm_ascend/attention/mla_v1.py:622
Tensors = dict[str, torch.Tensor]


class Life:
    """What an engine's weights are worth.

    `loaded`: something before a first sync, or no sync will say that it has `filled` them.
    """

    _asleep: Collection[str]  # vLLM's tags

    def __init__(self, loaded: bool):
        self._weights_stay, self._lost = loaded, False

    def filled(self, stay: bool = False) -> None:
        """A weight sync has written every weight; `stay`: no other sync comes, so they are to survive sleep."""
        self._weights_stay, self._lost = stay, False

    def check_ready(self) -> None:
        """PatchError if something is asleep, or weights have not been filled since they were given up."""
        if self._asleep:
            raise PatchError(f"rollout: asked to generate while {' and '.join(sorted(self._asleep))} of the engine are "
                             "asleep: call LLM.wake_up first")
        if self._lost:
            raise PatchError("rollout: asked to generate with weights that were given up when the engine went to "
                             "sleep and that no weight sync has filled since: enter verl's sharding manager first")


class RolloutLife(Life):
    """Sleep and wake of one engine, `llm`; see the head of this file. Asking for what is so already does nothing."""

    def __init__(self, llm: Any, loaded: bool = True):
        super().__init__(loaded)
        self._llm = llm
        self._asleep: dict[str, dict[str, Parked]] = {}
        self._cache: dict[str, int] = {}  # as it was built: number of blocks, bytes of each tensor

    def sleep(self, level: int = 1) -> None:
        """Give the memory back; `level` is vLLM's and says nothing here.

        PatchError if the cache is not as built, or in use: what vLLM knows of its blocks' contents is forgotten here.
        """
        if CACHE not in self._asleep:
            self._forget_blocks()
            self._check_cache()
            self._drop(CACHE)
        if WEIGHTS not in self._asleep and not self._weights_stay:
            self._lost = True
            self._drop(WEIGHTS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again, of all or of vLLM's `tags`. PatchError if somebody gave a tensor another storage."""
        for tag in [tag for tag in TAGS if tag in self._asleep and (tags is None or tag in tags)]:
            now = self._tensors(tag)
            for name, parked in self._asleep[tag].items():
                if name not in now or storage_id(now[name]) != parked.storage._cdata:
                    raise PatchError(f"rollout: {name}: expected the storage with which the engine went to sleep, "
                                     f"found {'another' if name in now else 'no such tensor'}: somebody else has "
                                     "replaced it")
                parked.check(now[name])
            for parked in unique(self._asleep[tag].values()):
                parked.make_room()
                if tag == CACHE:
                    torch.empty(0, dtype=torch.uint8, device=parked.device).set_(parked.storage).zero_()
            del self._asleep[tag]
            if tag == CACHE:
                self._check_cache()

    def _forget_blocks(self) -> None:
        engine = self._llm.llm_engine  # these two have one name in engines V0 and V1
        unfinished = engine.get_num_unfinished_requests()
        if unfinished:
            raise PatchError(f"rollout: asked to sleep with {unfinished} unfinished requests, whose blocks would be "
                             "lost: expected 0; let them end or abort them")
        if engine.reset_prefix_cache() is False:  # V1 says nothing
            raise PatchError("rollout: asked to sleep, but vLLM cannot reset its prefix cache: some blocks are in use, "
                             "expected none after the last request")

    def _drop(self, tag: str) -> None:
        asleep, by_storage = {}, {}
        for name, tensor in self._tensors(tag).items():
            asleep[name] = by_storage.setdefault(storage_id(tensor), Parked(name, tensor))
        for parked in by_storage.values():
            parked.leave(copy=False)
        self._asleep[tag] = asleep

    def _tensors(self, tag: str) -> Tensors:
        if tag == CACHE:
            return {f"kv_cache[{i}]": each for i, each in enumerate(tensors_in(kv_caches(self._llm)))}
        return weights_of(vllm_worker(self._llm).model_runner.model)

    def _check_cache(self) -> None:
        found = {"blocks": self._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}
        found |= {name: tensor.untyped_storage().nbytes() for name, tensor in self._tensors(CACHE).items()}
        if len(found) == 1:
            raise PatchError("rollout: expected the engine's KV cache in its model runner or worker, found none")
        self._cache = self._cache or found
        for name in [*self._cache, *(name for name in found if name not in self._cache)]:
            if self._cache.get(name) != found.get(name):
                what = "blocks of KV cache" if name == "blocks" else f"{name} in bytes"
                raise PatchError(f"rollout: {what}: expected {self._cache.get(name)} as the engine was built, found "
                                 f"{found.get(name)}: somebody else has rebuilt the cache")


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


def of(llm: Any) -> Life | None:
    """The life of an engine; None where it never sleeps, or as vLLM has it."""
    return getattr(llm, "rollout_life", None)


def filled(llm: Any, stay: bool) -> None:
    """`Life.filled` of an engine that has one: whoever syncs weights calls it afterwards."""
    life = of(llm)
    if life is not None:
        life.filled(stay)


def post_load(model: torch.nn.Module) -> int:
    """Derive the absorbed projections of every layer again where needed; how many layers that were.

    Call it after the last weight of a sync has been written. On an NPU with enable_weight_nz_layout the projections are
    in format NZ: copying NZ into NZ is torch_npu's work and cannot be tried here.
    """
    # vars: hasattr on a module is slow where the answer is no, and this runs at every sync
    return sum(absorb_in_place(module) for module in model.modules() if "impl" in vars(module))


def absorb_in_place(attention: Any) -> bool:
    """Give one attention layer the projections of its present kv_b_proj; whether anything had to be done.

    `attention`: vLLM's Attention, its `impl` holds the projections. New values go into the tensors that are there: a
    captured graph reads those addresses. Nothing is done before vLLM has derived them (the first load), and where they
    are views of kv_b_proj, as vLLM's own are (vllm-ascend copies, and MindSpeed makes torch.Tensor.view copy).
    """
    holder = attention.impl
    held = {name: getattr(holder, name) for name in ABSORBED if hasattr(holder, name)}
    weight = getattr(getattr(holder, "kv_b_proj", None), "weight", None)
    if not held or (weight is not None and all(storage_id(tensor) == storage_id(weight) for tensor in held.values())):
        return False
    with torch.no_grad():
        attention.process_weights_after_loading(held["W_UV"].dtype)
        for name, tensor in held.items():
            tensor.copy_(getattr(holder, name))
            setattr(holder, name, tensor)
    return True
