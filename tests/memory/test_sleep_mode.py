"""Sleep modes of an engine: memory that sleep frees, and refusals. With real engines: tests/emulation.

With graphs vLLM's own sleep mode runs, here its real allocator over host memory.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.runs import composed
from verl_patches.emulation.npu import memory_pool
from verl_patches.emulation.npu.npu_module import npu
from verl_patches.errors import RecipeError
from verl_patches.memory.sleep_mode import CumemSleepMode, ResizeSleepMode, weights_of
from verl_patches.patching import engine as patches
from verl_patches.patching.row import subclass_of
from verl_patches.worker import context as contexts
from verl_patches.worker.context import WorkerContext
from verl_patches.worker.memory import WorkerMemory, checked_device
from verl_patches.worker.rollout_engine import RolloutEngine, weights_move


class Attention(torch.nn.Module):
    """A layer as vLLM's: a weight, and an impl with what is derived from it."""

    def __init__(self):
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(4, 6, bias=False)
        self.impl = SimpleNamespace(W_UV=self.kv_b_proj.weight.data.clone(), W_UK_T=self.kv_b_proj.weight.data.t())
        self.register_buffer("scale", torch.ones(3))


class Model(torch.nn.Module):
    """Tied weights, a slice of another's storage, and one that a buffer shares."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.attention = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False), Attention()
        self.head.weight = self.embed.weight
        stack = torch.ones(2, 5)
        self.up, self.down = (torch.nn.Parameter(part) for part in stack)
        table = torch.ones(7)
        self.shared = torch.nn.Parameter(table[:3])
        self.register_buffer("table", table)


def engine():
    """(LLM as far as a sleep mode looks, its model, its cache)."""
    model, caches = Model(), [torch.ones(5, 2), (torch.ones(5, 3), torch.ones(4))]
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, kv_caches=caches))
    core = SimpleNamespace(get_num_unfinished_requests=lambda: 0, reset_prefix_cache=lambda: True)
    core.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=5))
    core.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    return SimpleNamespace(llm_engine=core), model, caches


def bytes_of(*tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_each_storage_is_freed_once_and_allocated_again_unless_a_buffer_shares_it():
    llm, model, caches = engine()
    mode, weights = ResizeSleepMode(llm), weights_of(model).values()
    full, cache = bytes_of(*weights), (caches[0], *caches[1])
    assert full == 4 * (8 * 4 + 6 * 4 + 6 * 4 + 2 * 5)
    assert {id(t) for t in model.parameters()} - {id(t) for t in weights} == {id(model.shared)}
    mode.weights_written(last=False)
    mode.sleep()
    assert bytes_of(*weights) == bytes_of(*cache) == 0 and model.shared.sum() == 3 and model.attention.scale.sum() == 3
    mode.sleep()  # idempotent
    mode.wake_up(["weights"])
    assert bytes_of(*weights) == full and bytes_of(*cache) == 0
    mode.wake_up()
    assert bytes_of(*cache) == 4 * (10 + 15 + 4) and not any(each.any() for each in cache)
    assert model.head.weight is model.embed.weight and model.attention.impl.W_UK_T.shape == (4, 6)


def test_weights_stay_until_a_sync_replaces_them():
    llm, model, _ = engine()
    mode = ResizeSleepMode(llm)
    for last in (False, True):
        if last:
            mode.weights_written(last=True)
        mode.sleep()
        assert bytes_of(*model.parameters()) > 0
        mode.wake_up()
        mode.check_ready()
    mode.weights_written(last=False)
    for each in (mode, ResizeSleepMode(llm, loaded=False)):  # load_format=dummy
        each.sleep()
        assert bytes_of(*weights_of(model).values()) == 0
        each.wake_up()
        with pytest.raises(RecipeError, match="no weight sync has written"):
            each.check_ready()
        each.weights_written(last=False)
        each.check_ready()


def test_a_cache_in_use_is_not_freed_and_the_prefix_cache_is_reset_once():
    llm, _, caches = engine()
    mode, core, resets = ResizeSleepMode(llm), llm.llm_engine, []
    core.get_num_unfinished_requests = lambda: 2
    with pytest.raises(RecipeError, match=r"sleep\(\) with 2 unfinished requests"):
        mode.sleep()
    core.get_num_unfinished_requests, core.reset_prefix_cache = lambda: 0, lambda: False
    with pytest.raises(RecipeError, match="cannot reset its prefix cache"):
        mode.sleep()
    core.reset_prefix_cache = lambda: resets.append(1)  # as in V1: no answer
    pool = SimpleNamespace(num_gpu_blocks=8, get_num_free_blocks=lambda: 6)
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool))
    core.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    with pytest.raises(RecipeError, match="cannot reset its prefix cache"):
        mode.sleep()
    assert bytes_of(caches[0]) == 40 and resets.pop() == 1
    pool.get_num_free_blocks = lambda: 7
    mode.sleep()
    mode.sleep()
    assert resets == [1] and bytes_of(caches[0]) == 0


def test_another_storage_or_another_cache_is_refused_by_name():
    llm, model, caches = engine()
    mode = ResizeSleepMode(llm)
    mode.sleep()
    mode.wake_up()

    def refused(action, words):
        with pytest.raises(RecipeError, match=words):
            action()

    caches[0] = torch.ones(6, 2)
    refused(mode.sleep, r"kv_cache\[0\] in bytes: expected 40 as the engine was built, found 48")
    caches[0] = torch.ones(5, 2)
    llm.llm_engine.vllm_config.cache_config.num_gpu_blocks = 4
    refused(mode.sleep, "KV cache, blocks: expected 5 .* found 4")
    llm.llm_engine.vllm_config.cache_config.num_gpu_blocks = 5
    mode.weights_written(last=False)
    mode.sleep()
    model.down.data = torch.ones(5)
    refused(mode.wake_up, "down: expected the storage .* found another")
    caches.clear()
    refused(ResizeSleepMode(llm).sleep, "KV cache .* found none")


class LLM:
    """vLLM's, as far as RolloutEngine looks: `seen` has what it was built with, `calls` what reached it."""

    def __init__(self, **kwargs):
        self.seen, self.calls, self.llm_engine = kwargs, [], engine()[0].llm_engine
        vars(self.llm_engine).update(
            add_request=lambda number: number + 1, sleep=self.engine_sleep, wake_up=self.engine_wake
        )

    def engine_sleep(self, level=1):
        self.calls.append("vLLM's sleep")

    def engine_wake(self, tags=None):
        self.calls.append(f"vLLM's wake {tags}")

    def sleep(self, level=1):
        self.calls.append("sleep")
        self.llm_engine.sleep(level)

    def wake_up(self, tags=None):
        self.calls.append(f"wake {tags}")
        self.llm_engine.wake_up(tags)

    def generate(self, *args):
        self.calls.append("generate")
        return args


@pytest.fixture
def build(monkeypatch):
    """build(rows, **arguments): an engine of ours over `LLM`, with these rows on and in a context of its own."""

    def of(rows, **arguments):
        monkeypatch.setattr(patches.of_process, "value", SimpleNamespace(wanted=rows))
        return subclass_of(LLM, RolloutEngine)(**arguments)

    monkeypatch.setattr(contexts, "_context", WorkerContext())
    monkeypatch.setattr(checked_device, "value", None)
    monkeypatch.setattr(weights_move, "value", False)
    return of


@pytest.mark.parametrize(("rows", "load_format", "stay"), [
    (("reshard.direct",), "dummy", False),
    (("update.sharding_manager",), "dummy", True),  # verl's own path does not prove that it writes every weight
    (("reshard.direct",), "auto", True),
])  # fmt: skip
def test_weights_that_no_sync_proves_to_write_are_not_freed(rows, load_format, stay, build):
    llm = build((*rows, "memory.sleep_mode"), enable_sleep_mode=True, enforce_eager=True, load_format=load_format)
    llm.sleep()
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    assert (bytes_of(*model.parameters()) > 28) == stay  # 28: shared with a buffer


@pytest.mark.parametrize(("arguments", "passed", "kind"), [
    ({"enable_sleep_mode": True, "enforce_eager": True}, False, ResizeSleepMode),
    ({"enable_sleep_mode": True, "enforce_eager": False}, True, CumemSleepMode),  # graphs have captured addresses
    ({"enable_sleep_mode": True, "additional_config": {"vllm_sleep_mode": False}}, False, ResizeSleepMode),
    ({"enforce_eager": True}, None, type(None)),  # it is not to sleep
])  # fmt: skip
def test_an_engine_that_sleeps_has_our_sleep_mode_and_an_eager_one_not_vllms(arguments, passed, kind, build):
    """Rows memory.sleep_mode and rollout.engine."""
    llm = build(("memory.sleep_mode",), **arguments)
    mode = llm.sleep_mode
    assert llm.seen.get("enable_sleep_mode") is passed and isinstance(mode, kind)
    assert llm.llm_engine.add_request(1) == 2 and not llm.seen.get("additional_config")
    assert weights_move.value == (kind is ResizeSleepMode)
    if mode:
        assert llm.llm_engine.sleep == mode.sleep and llm.llm_engine.wake_up == mode.wake_up
        mode._asleep = {"kv_cache": {}}
        with pytest.raises(RecipeError, match="kv_cache of the engine are asleep"):
            llm.llm_engine.add_request(1)


def test_with_the_row_off_vllms_own_sleep_mode_stays(build):
    """Negative control."""
    llm = build((), enable_sleep_mode=True, enforce_eager=True)
    llm.weights_written(last=False)
    llm.sleep()
    assert llm.sleep_mode is None and llm.calls == ["sleep", "vLLM's sleep"] and not llm.awake


@pytest.fixture
def sleeper(build, monkeypatch):
    """sleeper(rows, **arguments): such an engine of rank 3 on the emulated device, with 1 MB of each memory group."""

    def of(rows, **arguments):
        llm = build(rows, enable_sleep_mode=True, load_format="dummy", **arguments)
        patches.current().switches = SimpleNamespace(platform="npu_emulated")
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        llm.llm_engine.vllm_config.model_config = SimpleNamespace(enable_sleep_mode=llm.seen["enable_sleep_mode"])
        runner.model = torch.nn.Linear(512, 512, bias=False)
        runner.kv_caches[:] = [torch.ones(512, 512)]
        for tensor in (runner.model.weight, *runner.kv_caches):
            memory_pool.note(tensor, (), for_device=True)
        checked_device.value = npu
        return llm

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    return of


OURS = ("memory.sleep_mode", "reshard.direct")
EACH = 1 << 20


def fill_cache():
    """Leave 4 MB in the cache of the emulated allocator."""
    tensor = torch.ones(EACH)
    memory_pool.note(tensor, (), for_device=True)
    assert npu.memory_reserved() >= 6 * EACH


def test_memory_that_sleep_frees_must_be_the_devices_again(sleeper, monkeypatch):
    llm, (free, _) = sleeper(OURS, enforce_eager=True), npu.mem_get_info()
    llm.sleep()
    assert npu.mem_get_info()[0] - free == 2 * EACH
    llm.sleep()  # nothing more to free
    llm.wake_up()
    fill_cache()
    monkeypatch.setattr(npu, "empty_cache", lambda: None)  # the control: torch's allocator keeps what it was given
    with pytest.raises(RecipeError) as refused:
        llm.sleep()
    for words in ("rank 3", "rollout_weights 1,048,576", "kv_cache 1,048,576", "found 0 ", "expandable_segments:True"):
        assert words in str(refused.value)


def test_what_torch_gives_back_of_its_cache_does_not_count_for_what_sleep_frees(sleeper):
    llm = sleeper((), enforce_eager=False)  # vLLM's own sleep, which frees nothing here
    fill_cache()
    with pytest.raises(RecipeError, match="torch's cache 4,194,304.*found 4,194,304 .*vllm_sleep_mode=false"):
        llm.sleep()
    checked_device.value = None  # a CPU, and recipe.memory.ledger=off
    llm.wake_up()
    llm.sleep()


@pytest.mark.parametrize(("platform", "ledger", "rows", "device"), [
    ("cuda", "report", ("memory.ledger",), torch.cuda),
    ("cuda", "off", ("memory.ledger",), None),
    ("cpu", "strict", ("memory.ledger",), None),
])  # fmt: skip
def test_a_worker_checks_sleep_where_there_is_a_device_and_a_ledger(platform, ledger, rows, device, build, monkeypatch):
    run = composed("deepseekv3_tiny_cpu", [f"recipe.memory.ledger={ledger}"])
    monkeypatch.setattr(patches.of_process, "value", SimpleNamespace(wanted=rows))
    WorkerMemory(run.verl.actor_rollout_ref, replace(run, recipe=replace(run.recipe, platform=platform)))
    assert checked_device.value is device


def test_what_is_awake_is_not_woken_and_every_call_begins_its_phase(build):
    """verl wakes the cache twice on one line, once on the other; a phase per tag that was asleep."""
    llm, phases = build((), enable_sleep_mode=True), []
    contexts.context().ledger = SimpleNamespace(raise_peak=lambda extra_bytes: phases.append("look"))

    def begin(phase, by_vllm):
        if by_vllm is not None:
            by_vllm()
        phases.append(phase)

    contexts.context().scheduler = SimpleNamespace(begin=begin)
    llm.wake_up()
    assert llm.calls == phases == []
    llm.sleep()
    wake, llm.llm_engine.wake_up = llm.llm_engine.wake_up, lambda tags: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.wake_up(["weights"])
    llm.llm_engine.wake_up = wake
    llm.wake_up(["weights"])  # a wake-up that failed is repeated
    llm.wake_up()
    llm.wake_up(["kv_cache"])
    assert llm.generate(1) == (1, None) and llm.awake == {"weights", "kv_cache"}
    calls = ", ".join(call for call in llm.calls if "vLLM" not in call)
    assert calls == "sleep, wake ['weights'], wake ['weights'], wake ['kv_cache'], generate"
    assert phases == ["look", "sleep", "reshard", "wake_kv", "rollout", "look"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", pytest.param("vllm_ascend", marks=pytest.mark.upstream)])
def test_only_memory_that_the_sync_does_not_write_is_copied_and_outlives_vllms_sleep(engine, run_ranks, pytestconfig):
    file = "vllm-ascend/vllm_ascend/device_allocator/camem.py"
    arguments = [str(pytestconfig.getoption("--upstream") / file)] if engine == "vllm_ascend" else []
    run_ranks("tests.memory.sleep_mode:sleeps", *arguments, backend=None)
