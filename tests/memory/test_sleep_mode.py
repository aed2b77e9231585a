"""Test sleep modes of an engine: memory that sleep frees, and refusals; tests/emulation has real engines."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.runs import composed
from verl_patches.emulation.npu.npu_module import npu
from verl_patches.errors import RecipeError
from verl_patches.memory.sleep_mode import SleepMode, freeable_weights, require_freed_memory
from verl_patches.patching import engine as patches
from verl_patches.patching.row import make_subclass
from verl_patches.worker import context as contexts
from verl_patches.worker.context import WorkerContext
from verl_patches.worker.memory import WorkerMemory, free_memory_device
from verl_patches.worker.rollout_engine import RolloutEngine, weights_move


class Attention(torch.nn.Module):
    """Stand in for vLLM's layer: a weight, and an impl with tensors derived from it."""

    def __init__(self):
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(4, 6, bias=False)
        self.impl = SimpleNamespace(W_UV=self.kv_b_proj.weight.data.clone(), W_UK_T=self.kv_b_proj.weight.data.t())
        self.register_buffer("scale", torch.ones(3))


class Model(torch.nn.Module):
    """Hold tied weights, a slice of another's storage, and one that a buffer shares."""

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
    """Return the parts of an LLM that a sleep mode reads, its model, its cache."""
    model, caches = Model(), [torch.ones(5, 2), (torch.ones(5, 3), torch.ones(4))]
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, kv_caches=caches))
    core = SimpleNamespace(get_num_unfinished_requests=lambda: 0, reset_prefix_cache=lambda: True)
    core.vllm_config = SimpleNamespace()
    core.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    return SimpleNamespace(llm_engine=core), model, caches


def storage_bytes(*tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_each_storage_is_freed_once_and_allocated_again_unless_a_buffer_shares_it():
    llm, model, caches = engine()
    mode, weights = SleepMode(llm), freeable_weights(model).values()
    full, cache = storage_bytes(*weights), (caches[0], *caches[1])
    assert full == 4 * (8 * 4 + 6 * 4 + 6 * 4 + 2 * 5)
    assert {id(t) for t in model.parameters()} - {id(t) for t in weights} == {id(model.shared)}
    mode.mark_weights_written(last=False)
    mode.sleep()
    assert (
        storage_bytes(*weights) == storage_bytes(*cache) == 0
        and model.shared.sum() == 3
        and model.attention.scale.sum() == 3
    )
    mode.sleep()  # idempotent
    mode.wake_up(["weights"])
    assert storage_bytes(*weights) == full and storage_bytes(*cache) == 0
    mode.wake_up()
    assert storage_bytes(*cache) == 4 * (10 + 15 + 4) and not any(each.any() for each in cache)
    assert model.head.weight is model.embed.weight and model.attention.impl.W_UK_T.shape == (4, 6)


def test_weights_stay_until_a_sync_replaces_them():
    llm, model, _ = engine()
    mode = SleepMode(llm)
    for last in (False, True):
        if last:
            mode.mark_weights_written(last=True)
        mode.sleep()
        assert storage_bytes(*model.parameters()) > 0
        mode.wake_up()
        mode.check_ready()
    mode.mark_weights_written(last=False)
    for each in (mode, SleepMode(llm, loaded=False)):  # load_format=dummy
        each.sleep()
        assert storage_bytes(*freeable_weights(model).values()) == 0
        each.wake_up()
        with pytest.raises(RecipeError, match="no weight sync has written"):
            each.check_ready()
        each.mark_weights_written(last=False)
        each.check_ready()


def test_a_cache_in_use_is_not_freed_and_the_prefix_cache_is_reset_once():
    llm, _, caches = engine()
    mode, core, resets = SleepMode(llm), llm.llm_engine, []
    core.get_num_unfinished_requests = lambda: 2
    with pytest.raises(RecipeError, match=r"sleep\(\) with 2 unfinished requests"):
        mode.sleep()
    core.get_num_unfinished_requests, core.reset_prefix_cache = lambda: 0, lambda: False
    with pytest.raises(RecipeError, match="cannot reset its prefix cache"):
        mode.sleep()
    core.reset_prefix_cache = lambda: resets.append(1)  # engine V1 returns None
    pool = SimpleNamespace(num_gpu_blocks=8, get_num_free_blocks=lambda: 6)
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool))
    core.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    with pytest.raises(RecipeError, match="cannot reset its prefix cache"):
        mode.sleep()
    assert storage_bytes(caches[0]) == 40 and resets.pop() == 1
    pool.get_num_free_blocks = lambda: 7
    mode.sleep()
    mode.sleep()
    assert resets == [1] and storage_bytes(caches[0]) == 0


def test_another_storage_or_no_cache_is_refused_by_name():
    llm, model, caches = engine()
    mode = SleepMode(llm, loaded=False)
    mode.sleep()
    model.down.data = torch.ones(5)
    with pytest.raises(RecipeError, match="up: expected its original storage, of .* found another one"):
        mode.wake_up()
    caches.clear()
    with pytest.raises(RecipeError, match="KV cache .* found none"):
        SleepMode(llm).sleep()


class LLM:
    """Stand in for vLLM's LLM under RolloutEngine: `seen` has the arguments, `calls` the calls that reached it."""

    def __init__(self, **kwargs):
        self.seen, self.calls, self.llm_engine = kwargs, [], engine()[0].llm_engine
        vars(self.llm_engine).update(
            add_request=lambda number: number + 1, sleep=self.engine_sleep, wake_up=self.engine_wake, scheduler=[]
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
    """Return build(rows, **arguments), which makes our engine over `LLM` with these patches in its own context."""

    def make_engine(rows, **arguments):
        monkeypatch.setattr(patches.process_engine, "value", SimpleNamespace(wanted=rows))
        return make_subclass(LLM, RolloutEngine)(**arguments)

    monkeypatch.setattr(contexts, "_context", WorkerContext())
    monkeypatch.setattr(free_memory_device, "value", None)
    monkeypatch.setattr(weights_move, "value", False)
    return make_engine


@pytest.mark.parametrize(("rows", "load_format", "stay"), [
    (("reshard.direct",), "dummy", False),
    (("update.sharding_manager",), "dummy", True),  # verl's own path does not prove that it writes every weight
    (("reshard.direct",), "auto", True),
])  # fmt: skip
def test_weights_that_no_sync_proves_to_write_are_not_freed(rows, load_format, stay, build):
    llm = build((*rows, "memory.sleep_mode"), enable_sleep_mode=True, enforce_eager=True, load_format=load_format)
    llm.sleep()
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    assert (storage_bytes(*model.parameters()) > 28) == stay  # 28: shared with a buffer


@pytest.mark.parametrize(("arguments", "passed", "kind"), [
    ({"enable_sleep_mode": True}, False, SleepMode),
    ({"enforce_eager": True}, None, type(None)),  # sleep mode is off
])  # fmt: skip
def test_an_engine_that_sleeps_has_our_sleep_mode_and_not_vllms(arguments, passed, kind, build):
    """Test rows memory.sleep_mode and rollout.engine."""
    llm = build(("memory.sleep_mode",), **arguments)
    mode = llm.sleep_mode
    assert llm.seen.get("enable_sleep_mode") is passed and isinstance(mode, kind)
    assert llm.llm_engine.add_request(1) == 2
    assert weights_move.value == (kind is SleepMode)
    if mode:
        assert llm.llm_engine.sleep == mode.sleep and llm.llm_engine.wake_up == mode.wake_up
        mode._asleep = {"kv_cache": {}}
        with pytest.raises(RecipeError, match="kv_cache of the engine are asleep"):
            llm.llm_engine.add_request(1)


def test_with_the_row_off_vllms_own_sleep_mode_stays(build):
    """Check as a negative control that vLLM's own mode is used."""
    llm = build((), enable_sleep_mode=True, enforce_eager=True)
    llm.mark_weights_written(last=False)
    llm.sleep()
    assert llm.sleep_mode is None and llm.calls == ["sleep", "vLLM's sleep"] and not llm.awake


@pytest.mark.parametrize(("by_vllm", "todo"), [(True, "memory.sleep_mode"), (False, "expandable_segments:True")])
def test_memory_that_sleep_frees_must_be_the_devices_again(monkeypatch, by_vllm, todo):
    """Return 60 bytes from torch's cache, which must not count for the KV cache, of 100 bytes."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    state = {"free": 0, "cached": 60, "kv_cache": 100}
    device = SimpleNamespace(mem_get_info=lambda: (state["free"], 1000), memory_allocated=lambda: 0)
    device.memory_reserved = lambda: state["cached"]

    def held():
        return {"kv_cache": state["kv_cache"], "grads": 7}

    with require_freed_memory(device, held, by_vllm):
        state.update(free=160, cached=0, kv_cache=0)
    state.update(free=0, cached=60, kv_cache=100)
    with pytest.raises(RecipeError, match=rf"rank 3: expected 160 .*kv_cache 100.*cache 60.*found 60 .*{todo}"):
        with require_freed_memory(device, held, by_vllm):
            state.update(free=60, cached=0, kv_cache=0)
    with require_freed_memory(device, held, by_vllm):
        pass  # the engine sleeps already


@pytest.mark.parametrize(("platform", "ledger", "checked"), [
    ("npu", "report", True), ("npu", "off", False), ("cpu", "strict", False),
])  # fmt: skip
def test_a_worker_checks_sleep_where_there_is_a_device_and_a_ledger(platform, ledger, checked, build, monkeypatch):
    run = composed("deepseekv3_tiny_cpu", [f"recipe.memory.ledger={ledger}"])
    monkeypatch.setattr(patches.process_engine, "value", SimpleNamespace(wanted=("memory.ledger",)))
    monkeypatch.setattr(torch, "get_device_module", {"npu": npu}.__getitem__)
    WorkerMemory(run.verl.actor_rollout_ref, replace(run, recipe=replace(run.recipe, platform=platform)))
    assert free_memory_device.value is (npu if checked else None)


def test_what_is_awake_is_not_woken_and_every_call_begins_its_phase(build):
    """Wake the cache twice as verl does on one line, once as on the other; each sleeping tag begins a phase."""
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
