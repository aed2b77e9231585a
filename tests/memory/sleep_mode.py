"""vLLM's sleep mode with its real allocator over memory of this process, where unmapping overwrites the memory.

The snapshot of torch's allocator is built here: a CPU has no such pool. Run by test_sleep_mode.py; raises if it fails.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import sys
import types
from types import SimpleNamespace

import torch

from verl_patches.errors import RecipeError
from verl_patches.memory import sleep_mode
from verl_patches.patching import engine as patches
from verl_patches.patching.row import subclass_of
from verl_patches.worker.rollout_engine import RolloutEngine

SEGMENT, TENSOR = 4096, 512  # bytes


def memory_of(address: int, count: int) -> torch.Tensor:
    """float32 [count] at `address`, in a storage of its own."""
    return torch.frombuffer((ctypes.c_char * (4 * count)).from_address(address), dtype=torch.float32)


def allocator_of(file: str | None):
    """(class, its module), with the driver's part replaced."""
    if file is None:
        module = importlib.import_module("vllm.device_allocator.cumem")
        module.libcudart = SimpleNamespace(cudaMemcpy=ctypes.memmove)
    else:
        driver = types.ModuleType("acl.rt")
        driver.memcpy = lambda target, room, source, size, kind: ctypes.memmove(target, source, size)
        sys.modules.update({"acl": types.ModuleType("acl"), "acl.rt": driver})
        torch.npu = SimpleNamespace(memory=SimpleNamespace(NPUPluggableAllocator=None))  # it annotates with that
        spec = importlib.util.spec_from_file_location("vllm_ascend.device_allocator.camem", file)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    module.unmap_and_release = lambda handle: ctypes.memset(handle[2], 0xAB, handle[1])
    module.create_and_map = lambda handle: None
    module.is_pin_memory_available = lambda: False
    return module.CuMemAllocator if file is None else module.CaMemAllocator


def refused(do) -> str:
    """The RecipeError of `do`, "" if there is none."""
    try:
        do()
    except RecipeError as error:
        return str(error)
    return ""


class Pool:
    """Segments of the allocator's, of which blocks are taken in turn."""

    def __init__(self, allocator, count: int):
        self._whole = torch.zeros(SEGMENT * count, dtype=torch.uint8)
        self._allocator, self.snapshot = allocator, []

    def segment(self, tag: str, *states: str) -> list[torch.Tensor]:
        """A segment with blocks in these states; float32 [32] in each."""
        at = self._whole.data_ptr() + SEGMENT * len(self.snapshot)
        self._allocator.current_tag = tag
        self._allocator.python_malloc_callback((0, SEGMENT, at, 0))
        places = [at + TENSOR * i for i in range(len(states))]
        blocks = [{"address": place, "state": state} for place, state in zip(places, states, strict=True)]
        self.snapshot.append({"address": at, "blocks": blocks})
        return [memory_of(place, 32) for place in places]


def sleeps(file: str | None = None) -> None:
    """With vLLM's CuMemAllocator, or vllm-ascend's CaMemAllocator from that file.

    Six segments of weights; in three others are in use: an expert map, a buffer, a block that waits for a stream. Only
    those are copied at a sleep between two syncs, and outlive it.
    """
    cls = allocator_of(file)
    cls.instance = allocator = cls()
    pool, lives, free, waits = Pool(allocator, 7), "active_allocated", "inactive", "active_pending_free"
    model, impl = torch.nn.Module(), SimpleNamespace()
    parameter = torch.nn.Parameter
    model.up, model.down = map(parameter, pool.segment("weights", lives, lives, free)[:2])
    alone, impl.W_UV = pool.segment("weights", lives, lives)
    model.kv_b_proj, model.impl = parameter(alone), impl
    beside_a_map, expert_map = pool.segment("weights", lives, lives)
    model.gate = parameter(beside_a_map)
    (table,) = pool.segment("weights", lives)
    model.register_buffer("table", table)
    model.shared = parameter(table[:8])
    pool.segment("weights", free)
    model.head = parameter(pool.segment("weights", lives, waits)[0])
    pool.segment("kv_cache", lives)
    names = ("up", "down", "gate", "table", "shared", "head")
    tensors = {name: getattr(model, name) for name in names}
    tensors |= {"kv_b_proj": alone, "W_UV": impl.W_UV, "expert_map": expert_map}
    sleep_mode._snapshot = lambda device: pool.snapshot

    calls: list[str] = []

    def sleep(level):
        calls.append("sleep")
        allocator.sleep(("weights",) if level == 1 else ())
        if "broken" in calls:
            raise AssertionError("Memory usage increased after sleeping.")

    def wake_up(tags):
        calls.append(f"wake {', '.join(tags)}")
        allocator.wake_up(tags)

    class LLM:
        """vLLM's, as far as RolloutEngine looks."""

        def __init__(self, **kwargs):
            driver = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))
            self.llm_engine = SimpleNamespace(sleep=sleep, wake_up=wake_up, add_request=lambda: None)
            self.llm_engine.model_executor = SimpleNamespace(driver_worker=driver)

    patches.of_process.value = SimpleNamespace(wanted=("reshard.direct", "memory.sleep_mode"))
    llm = subclass_of(LLM, RolloutEngine)(enable_sleep_mode=True, enforce_eager=False, load_format="auto")
    pieces = allocator.pointer_to_data
    assert sum(each.tag == "weights" for each in pieces.values()) == 6
    lost = {"up", "down", "kv_b_proj", "W_UV"}
    for step, copied in enumerate((6, 3, 6)):  # as loaded; after a sync; after the last one
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.copy_(torch.arange(len(tensor)) + step)
        if step:
            llm.weights_written(last=step == 2)
        llm.llm_engine.sleep(1)
        held = [each.cpu_backup_tensor for each in pieces.values() if each.cpu_backup_tensor is not None]
        assert sum(each.numel() for each in held) == copied * SEGMENT
        assert {each.tag for each in pieces.values()} == {"kv_cache", "weights"}
        assert "kv_cache and weights of the engine are asleep" in refused(llm.llm_engine.add_request)
        llm.llm_engine.wake_up(["weights"])
        assert refused(llm.llm_engine.add_request).startswith("rollout: kv_cache of")
        llm.llm_engine.wake_up(["kv_cache"])
        kept = {name for name, tensor in tensors.items() if torch.equal(tensor, torch.arange(len(tensor)) + step)}
        assert kept == tensors.keys() - (lost if step == 1 else set())
        assert ("no weight sync has written" in refused(llm.llm_engine.add_request)) == (step == 1)
    repeated_calls(llm, calls)
    assert "weights of the engine are asleep" in refused(llm.llm_engine.add_request)  # after an error inside sleep
    assert {each.tag for each in pieces.values()} == {"kv_cache", "weights"}


def repeated_calls(llm, calls: list[str]) -> None:
    """Calls without effect do not reach vLLM, and a half awake engine is woken before it sleeps; the last sleep fails.

    vLLM's executor sleeps and wakes all tags: it would forget one of two tags, or all of a sleep.
    """
    sleep, wake_up = llm.llm_engine.sleep, llm.llm_engine.wake_up
    calls.clear()
    wake_up()
    sleep()
    sleep()
    wake_up(["weights"])
    wake_up(list(sleep_mode.TAGS))
    sleep()
    wake_up(["weights"])
    sleep()
    half = ["wake weights", "wake kv_cache"]
    assert calls == ["sleep", *half, "sleep", *half, "sleep"]
    wake_up()
    llm.weights_written(last=False)
    calls.append("broken")
    with contextlib.suppress(AssertionError):
        sleep()
