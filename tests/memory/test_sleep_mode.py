"""Which memory of an engine goes to sleep, and what is refused when it wakes; with a real engine: tests/rollout."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.memory import sleep_mode
from verl_patches.memory.sleep_mode import GraphLife, RolloutLife, weights_of
from verl_patches.patching import engine as patches
from verl_patches.patching.engine import PatchError
from verl_patches.worker import rollout_engine


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
    """(LLM as far as a life looks, its model, its cache)."""
    model, caches = Model(), [torch.ones(5, 2), (torch.ones(5, 3), torch.ones(4))]
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, kv_caches=caches))
    config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=5))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    core = SimpleNamespace(model_executor=executor, vllm_config=config, get_num_unfinished_requests=lambda: 0,
                           reset_prefix_cache=lambda: None)
    return SimpleNamespace(llm_engine=core), model, caches


def bytes_of(*tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_each_storage_goes_once_and_comes_back_as_large_but_for_what_shares_a_buffer():
    llm, model, caches = engine()
    life, weights = RolloutLife(llm), weights_of(model).values()
    full, cache = bytes_of(*weights), (caches[0], *caches[1])
    assert full == 4 * (8 * 4 + 6 * 4 + 6 * 4 + 2 * 5)
    assert {id(t) for t in model.parameters()} - {id(t) for t in weights} == {id(model.shared)}
    life.filled()
    life.sleep()
    assert bytes_of(*weights) == bytes_of(*cache) == 0 and model.shared.sum() == 3 and model.attention.scale.sum() == 3
    life.sleep()  # again: nothing to do
    life.wake_up(["weights"])
    assert bytes_of(*weights) == full and bytes_of(*cache) == 0
    life.wake_up()
    assert bytes_of(*cache) == 4 * (10 + 15 + 4) and not any(each.any() for each in cache)
    assert model.head.weight is model.embed.weight and model.attention.impl.W_UK_T.shape == (4, 6)


def test_weights_stay_until_a_sync_has_filled_them_and_where_none_comes_again():
    llm, model, _ = engine()
    life = RolloutLife(llm)
    for stay in (None, True):
        if stay:
            life.filled(stay)
        life.sleep()
        assert bytes_of(*model.parameters()) > 0
        life.wake_up()
        life.check_ready()
    life.filled()
    for each in (life, RolloutLife(llm, loaded=False)):  # made up by load_format=dummy
        each.sleep()
        assert bytes_of(*weights_of(model).values()) == 0
        each.wake_up()
        with pytest.raises(PatchError, match="no weight sync has filled"):
            each.check_ready()
        each.filled()
        each.check_ready()


def test_a_cache_in_use_does_not_go_and_what_goes_is_forgotten():
    llm, _, caches = engine()
    life, core, resets = RolloutLife(llm), llm.llm_engine, []
    core.get_num_unfinished_requests = lambda: 2
    with pytest.raises(PatchError, match="sleep with 2 unfinished requests"):
        life.sleep()
    core.get_num_unfinished_requests, core.reset_prefix_cache = lambda: 0, lambda: False
    with pytest.raises(PatchError, match="cannot reset its prefix cache"):
        life.sleep()
    assert bytes_of(caches[0]) == 40
    core.reset_prefix_cache = lambda: resets.append(1)
    life.sleep()
    life.sleep()
    assert resets == [1] and bytes_of(caches[0]) == 0


def test_another_storage_or_another_cache_is_refused_by_name():
    llm, model, _ = engine()
    life = RolloutLife(llm)
    life.filled()
    life.sleep()
    model.down.data = torch.ones(5)
    with pytest.raises(PatchError, match="down.*somebody else has replaced it"):
        life.wake_up()
    llm, model, caches = engine()
    life = RolloutLife(llm)
    life.sleep()
    life.wake_up()
    caches[0] = torch.ones(6, 2)
    with pytest.raises(PatchError, match=r"kv_cache\[0\] in bytes: expected 40 as the engine was built, found 48"):
        life.sleep()
    caches[0] = torch.ones(5, 2)
    llm.llm_engine.vllm_config.cache_config.num_gpu_blocks = 4
    with pytest.raises(PatchError, match="blocks of KV cache: expected 5 .* found 4"):
        life.sleep()
    caches.clear()
    with pytest.raises(PatchError, match="KV cache .* found none"):
        RolloutLife(llm).sleep()


@pytest.mark.parametrize(("rows", "load_format", "stay"), [
    (("reshard.direct",), "dummy", False), (("update.sync_switch",), "dummy", True),
    (("reshard.direct",), "auto", True),
])
def test_weights_that_no_sync_will_vouch_for_are_never_given_up(rows, load_format, stay, monkeypatch):
    """verl's own path, rows reshard.direct* off: nothing proves that it writes every weight."""
    llm, model, _ = engine()
    llm.llm_engine.add_request = None
    monkeypatch.setattr(patches, "current", lambda: SimpleNamespace(wanted=rows))
    monkeypatch.setattr(rollout_engine, "_guarded", lambda life, add_request: None)
    rollout_engine.taken_over(lambda self, **kwargs: None)(
        llm, enable_sleep_mode=True, enforce_eager=True, load_format=load_format)
    llm.llm_engine.sleep()
    assert (bytes_of(*model.parameters()) > 28) == stay  # 28: what shares a buffer's memory


@pytest.mark.parametrize(("asked", "passed", "kind"), [
    ({"enable_sleep_mode": True, "enforce_eager": True}, False, RolloutLife),
    ({"enable_sleep_mode": True, "enforce_eager": False}, True, GraphLife),  # graphs have captured addresses
    ({"enforce_eager": True}, None, type(None)),  # it is not to sleep
])
def test_an_engine_that_is_to_sleep_has_our_life_and_an_eager_one_no_sleep_mode(asked, passed, kind):
    """Row memory.rollout_life."""
    seen = {}

    def init(self, **kwargs):
        seen.update(kwargs)
        self.llm_engine = engine()[0].llm_engine
        vars(self.llm_engine).update(add_request=lambda number: number + 1, sleep=None, wake_up=None)

    llm = SimpleNamespace()
    rollout_engine.taken_over(init)(llm, **asked)
    ours = sleep_mode.of(llm)
    assert seen.get("enable_sleep_mode") is passed and isinstance(ours, kind)
    assert llm.llm_engine.add_request(1) == 2
    if ours:
        assert llm.llm_engine.sleep == ours.sleep and llm.llm_engine.wake_up == ours.wake_up
        ours._asleep = {"kv_cache": {}}
        with pytest.raises(PatchError, match="kv_cache of the engine are asleep"):
            llm.llm_engine.add_request(1)
