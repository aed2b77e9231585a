"""An order carried out on real storages: exactly the table's moves, in its order, each followed by the ledger."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.memory import counters, scheduler
from verl_patches.memory import ledger as ledgers
from verl_patches.memory.ledger import Ledger, MemoryLedgerError
from verl_patches.memory.measure import held_bytes
from verl_patches.memory.schedule import OURS, simulate
from verl_patches.memory.scheduler import Conductor, trim_of
from verl_patches.memory.trims import by_order

SIZES = {"actor_params": 400, "grads": 800, "optimizer": 2400, "ref_params": 400, "rollout_weights": 600,
         "kv_cache": 1000, "reshard_buffers": 100, "swap_window": 10, "tensor_cache": 20}  # fmt: skip


class Buffer:
    """A mover of one storage, which counts what it copies and notes each move that did something."""

    of = None

    def __init__(self, name, log):
        self.name, self.log = name, log
        self.device = torch.zeros(SIZES[name], dtype=torch.uint8)
        self.host = torch.arange(SIZES[name], dtype=torch.int64).to(torch.uint8)
        self.device.untyped_storage().resize_(0)

    def _resize(self, size, verb):
        if self.device.untyped_storage().nbytes() != size:
            self.device.untyped_storage().resize_(size)
            self.log.append(f"{verb} {self.name}")
            return True
        return False

    def load(self):
        if self._resize(SIZES[self.name], "load"):
            self.device.copy_(self.host)

    def alloc(self):
        self._resize(SIZES[self.name], "alloc")

    def offload(self):
        if self.device.untyped_storage().nbytes():
            self.host.copy_(self.device)
            self._resize(0, "offload")

    def free(self):
        self._resize(0, "free")


@pytest.fixture
def made(monkeypatch):
    """made(tenants, stays) -> (conductor, log of moves, movers); the ledger is strict and measures the storages."""
    def make(tenants=tuple(SIZES), stays=(), order=OURS):
        log = []
        movers = {tenant: Buffer(tenant, log) for tenant in tenants}
        ledger = Ledger(order, stays, "strict")
        for tenant, mover in movers.items():
            ledger.register(tenant, lambda mover=mover: held_bytes([mover.device], "cpu"), full_bytes=SIZES[tenant])
        monkeypatch.setattr(ledgers, "_CURRENT", ledger)
        conductor = Conductor(order, lambda: log.append("trim"), stays)
        conductor.add(movers)
        return conductor, log, movers

    return make


def step(conductor):
    for phase in conductor.order.phases:
        conductor.begin(phase.name)
    conductor.end()


def test_every_step_does_what_the_table_says_and_the_simulation_predicts(made):
    conductor, log, movers = made()
    step(conductor)
    first = list(log)
    log.clear()
    step(conductor)
    moments = simulate(OURS, SIZES).values()
    assert first[0] == "load actor_params" and log[0] == "alloc rollout_weights"  # weights stayed since the update
    loads = sum(SIZES[word.split()[1]] for word in log if word.startswith("load"))
    offloads = sum(SIZES[word.split()[1]] for word in log if word.startswith("offload"))
    assert loads == sum(m.to_device_bytes for m in moments) and offloads == sum(m.to_host_bytes for m in moments)
    assert log.count("trim") == sum(m.trims for m in moments) == 2
    peaks = {r["phase"]: r["peak_bytes"] for r in ledgers.current().take()["records"]}
    assert all(peaks[m.phase] <= m.peak_bytes for m in moments) and peaks["update"] == 400 + 800 + 2400 + 10
    movers["optimizer"].load()
    assert torch.equal(movers["optimizer"].device, torch.arange(2400).to(torch.uint8))  # there and back, unchanged


def test_a_phase_that_the_order_leaves_out_leaves_nothing_behind(made):
    """The truth check's pass in a run without old log-probs; the strict ledger would stop at ref otherwise."""
    conductor, log, _ = made(order=OURS.without("old_log_prob"))
    step(conductor)
    log.clear()
    for phase in ("reshard", "wake_kv", "rollout", "sleep", "old_log_prob", "ref", "update"):
        conductor.begin(phase)
        if phase == "old_log_prob":
            conductor.end()  # as the actor's pass does
    assert log[log.index("load actor_params") :][:2] == ["load actor_params", "free actor_params"]
    with pytest.raises(ConfigError, match="no phase 'nap'"):
        conductor.begin("nap")


def test_a_phase_that_failed_is_left_before_the_next_begins(made):
    conductor, log, _ = made(("actor_params", "grads", "optimizer", "rollout_weights", "reshard_buffers"))
    conductor.begin("update")
    conductor.begin("reshard")  # the update raised; its moves at the end were not done
    assert log.index("free grads") < log.index("alloc rollout_weights")
    before = list(log)
    conductor.end()
    conductor.end()
    assert log[len(before):] == ["free reshard_buffers", "offload actor_params"]


def test_what_moves_by_itself_or_not_at_all_is_left_alone(made):
    conductor, log, movers = made(("actor_params", "ref_params", "grads"), stays={"grads"})
    with pytest.raises(MemoryLedgerError, match="grads .* holds 0 bytes, expected 800"):
        step(conductor)
    movers["grads"].device.untyped_storage().resize_(800)
    log.clear()
    step(conductor)
    assert {word.split()[-1] for word in log} == {"actor_params", "ref_params", "trim"}


def test_a_mover_that_forgets_is_caught_at_the_next_phase(made):
    """Negative control."""
    conductor, _, movers = made()
    movers["ref_params"].free = lambda: None
    with pytest.raises(MemoryLedgerError, match=r"entering advantage: ref_params .* after ref \(free\)"):
        step(conductor)


VLLMS = ("rollout_weights", "kv_cache")


def test_what_vllm_moves_comes_in_the_place_that_the_table_has(made):
    conductor, log, movers = made(tuple(tenant for tenant in SIZES if tenant not in VLLMS))
    conductor.begin("reshard", lambda: log.append("wake weights"))
    conductor.begin("wake_kv", lambda: log.append("wake cache"))
    conductor.begin("rollout", lambda: log.append("never"))
    conductor.begin("sleep", lambda: log.append("sleep"))
    assert log == ["load actor_params", "wake weights", "alloc reshard_buffers", "free reshard_buffers",
                   "offload actor_params", "trim", "wake cache", "alloc tensor_cache", "sleep", "trim"]


def test_a_wake_that_fails_leaves_nothing_that_the_next_step_meets(made):
    conductor, log, _ = made(tuple(tenant for tenant in SIZES if tenant not in VLLMS))

    def fail():
        raise MemoryError("no memory for the cache")

    conductor.begin("reshard", lambda: None)
    with pytest.raises(MemoryError):
        conductor.begin("wake_kv", fail)
    log.clear()
    conductor.begin("reshard", lambda: None)
    assert log == ["load actor_params", "alloc reshard_buffers"]


def test_a_second_generation_and_a_step_without_an_update_leave_the_table_true(made):
    """REMAX and validation generate again; a critic's warm-up updates nothing. The ledger is strict."""
    conductor, log, movers = made()
    again = ("reshard", "wake_kv", "rollout", "sleep")
    step(conductor)
    movers["tensor_cache"].free()
    for phase in (*again, "old_log_prob", "ref"):
        conductor.begin(phase)
    conductor.end()
    movers["tensor_cache"].free()  # its scope ends with the step (trainer/tensor_cache.py, end_step)
    log.clear()
    step(conductor)
    assert "load actor_params" in log and log.index("offload actor_params") < log.index("alloc kv_cache")


def test_trims_are_on_record_and_without_a_conductor_only_the_ledger_hears(made, monkeypatch):
    conductor, log, _ = made(())
    counters.take_moves()
    step(conductor)
    assert [each["verb"] for each in counters.take_moves()] == ["trim", "trim"] == log
    scheduler.begin("rollout", lambda: log.append("vllm"))
    scheduler.end()
    assert log[2:] == ["vllm"] and not scheduler.moved_here(None) and scheduler.current() is None
    assert [r["phase"] for r in ledgers.current().take()["records"]][-1] == "rollout"
    monkeypatch.setattr(scheduler, "_current", conductor)
    scheduler.begin("sleep")
    assert log[3:] == ["trim"]


def test_whose_memory_a_conductor_moves(made):
    conductor, _, movers = made(stays={"grads"})
    movers["grads"].of, movers["optimizer"].of = chunks, optimizer = [1], [1]
    assert conductor.moves(optimizer) and not conductor.moves(chunks) and not conductor.moves([1])


def test_unknown_names_are_refused(made):
    with pytest.raises(ConfigError, match="movers for gards"):
        made()[0].add({"gards": None})
    with pytest.raises(ConfigError, match="no phase 'x'"):
        made()[0].begin("x")


@pytest.mark.parametrize(("settings", "own_life", "taken"), [
    ("expandable_segments:True", True, "light"),
    ("max_split_size_mb:128, expandable_segments:true", True, "light"),
    ("expandable_segments:True", False, "full"),  # vLLM's sleep mode takes memory past the pool
    ("expandable_segments:False", True, "full"),  # the light form raises there
    (None, True, "full"),
])
def test_the_light_form_of_empty_cache_is_taken_only_where_it_works_and_suffices(
        settings, own_life, taken, monkeypatch):
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    if settings:
        monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", settings)
    assert trim_of(SimpleNamespace(empty_cache="full", empty_virt_addr_cache="light"), own_life) == taken
    assert trim_of(SimpleNamespace(empty_cache="full"), own_life) == "full"
    assert trim_of(None, own_life)() is None and trim_of(torch.cuda, own_life) is torch.cuda.empty_cache


def test_what_fails_does_not_keep_the_rest_from_going(made):
    def fail():
        raise MemoryError("no host memory")

    conductor, log, movers = made(("actor_params", "grads", "optimizer"))
    conductor.begin("update")
    movers["optimizer"].offload = fail
    log.clear()
    with pytest.raises(MemoryError, match="no host memory"):
        conductor.end()
    assert log == ["free grads"]
    conductor, log, movers = made(("actor_params", "grads", "optimizer"))
    movers["actor_params"].load = fail
    with pytest.raises(MemoryError, match="no host memory"):
        conductor.begin("update")
    assert log == []  # nothing more comes after an error


def test_whom_the_order_has_on_the_device_now(made):
    conductor, _, _ = made()
    assert not conductor.has("optimizer")
    conductor.begin("update")
    assert conductor.has("optimizer") and conductor.has("actor_params")
    conductor.end()
    assert not conductor.has("optimizer") and conductor.has("actor_params")


def test_what_stands_for_torch_travels_as_verls_functions_do(monkeypatch):
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    found = cloudpickle.loads(cloudpickle.dumps(by_order(torch)))
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("trim"))
    found.cuda.empty_cache()
    assert calls == ["trim"] and found.Tensor is torch.Tensor and found.cuda.Stream is torch.cuda.Stream
    monkeypatch.setattr(scheduler, "_current", object())
    found.cuda.empty_cache()
    assert calls == ["trim"]
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_name"):  # as a copy asks before it has filled the object
        type(found).__new__(type(found)).no_such_name  # noqa: B018
