"""A schedule executed on real storages: exactly the table's moves, in its order, each followed by the ledger."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.memory import counters
from verl_patches.memory.ledger import Ledger, MemoryLedgerError
from verl_patches.memory.measure import held_bytes
from verl_patches.memory.schedule import SCHEDULE, simulate
from verl_patches.memory.scheduler import Scheduler, empty_cache_of
from verl_patches.worker import context as contexts
from verl_patches.worker.context import WorkerContext
from verl_patches.worker.empty_cache import without_empty_cache

SIZES = {
    "actor_params": 400,
    "grads": 800,
    "optimizer": 2400,
    "ref_params": 400,
    "rollout_weights": 600,
    "kv_cache": 1000,
    "reshard_buffers": 100,
    "swap_window": 10,
    "tensor_cache": 20,
}


class Buffer:
    """A handler of one storage, which counts what it copies and notes each move that did something."""

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
def made():
    """made(groups, stays) -> (scheduler, log of moves, handlers); its ledger is strict and measures the storages."""

    def make(groups=tuple(SIZES), stays=(), schedule=SCHEDULE):
        log = []
        handlers = {group: Buffer(group, log) for group in groups}
        ledger = Ledger(schedule, stays, "strict")
        for group, handler in handlers.items():
            ledger.register(group, lambda handler=handler: held_bytes([handler.device], "cpu"), full_bytes=SIZES[group])
        scheduler = Scheduler(schedule, lambda: log.append("empty_cache"), stays)
        scheduler.ledger = ledger
        scheduler.add(handlers)
        return scheduler, log, handlers

    return make


def step(scheduler):
    for phase in scheduler.schedule.phases:
        scheduler.begin(phase.name)
    scheduler.end()


def test_every_step_does_what_the_table_says_and_the_simulation_predicts(made):
    scheduler, log, handlers = made()
    step(scheduler)
    assert "offload" in counters.take_seconds()
    first = list(log)
    log.clear()
    step(scheduler)
    moments = simulate(SCHEDULE, SIZES).values()
    assert first[0] == "load actor_params" and log[0] == "alloc rollout_weights"  # weights stayed since the update
    loads = sum(SIZES[word.split()[1]] for word in log if word.startswith("load"))
    offloads = sum(SIZES[word.split()[1]] for word in log if word.startswith("offload"))
    assert loads == sum(m.to_device_bytes for m in moments) and offloads == sum(m.to_host_bytes for m in moments)
    assert log.count("empty_cache") == sum(m.empty_cache_calls for m in moments) == 2
    peaks = {r["phase"]: r["peak_bytes"] for r in scheduler.ledger.take()["records"]}
    assert all(peaks[m.phase] <= m.peak_bytes for m in moments) and peaks["update"] == 400 + 800 + 2400 + 10
    handlers["optimizer"].load()
    assert torch.equal(handlers["optimizer"].device, torch.arange(2400).to(torch.uint8))  # there and back, unchanged


def test_a_phase_that_the_schedule_leaves_out_leaves_nothing_behind(made):
    """The truth check's pass in a run without old log-probs; the strict ledger would stop at ref otherwise."""
    scheduler, log, _ = made(schedule=SCHEDULE.without("old_log_prob"))
    step(scheduler)
    log.clear()
    for phase in ("reshard", "wake_kv", "rollout", "sleep", "old_log_prob", "ref", "update"):
        scheduler.begin(phase)
        if phase == "old_log_prob":
            scheduler.end()  # as the actor's pass does
    assert log[log.index("load actor_params") :][:2] == ["load actor_params", "free actor_params"]
    with pytest.raises(ConfigError, match="no phase 'nap'"):
        scheduler.begin("nap")


def test_a_phase_that_failed_is_left_before_the_next_begins(made):
    scheduler, log, _ = made(("actor_params", "grads", "optimizer", "rollout_weights", "reshard_buffers"))
    scheduler.begin("update")
    scheduler.begin("reshard")  # the update raised; its moves at the end were not done
    assert log.index("free grads") < log.index("alloc rollout_weights")
    before = list(log)
    scheduler.end()
    scheduler.end()
    assert log[len(before) :] == ["free reshard_buffers", "offload actor_params"]


def test_what_moves_by_itself_or_not_at_all_is_left_alone(made):
    scheduler, log, handlers = made(("actor_params", "ref_params", "grads"), stays={"grads"})
    with pytest.raises(MemoryLedgerError, match="grads .* holds 0 bytes, expected 800"):
        step(scheduler)
    handlers["grads"].device.untyped_storage().resize_(800)
    log.clear()
    step(scheduler)
    assert {word.split()[-1] for word in log} == {"actor_params", "ref_params", "empty_cache"}


def test_a_mover_that_forgets_is_caught_at_the_next_phase(made):
    """Negative control."""
    scheduler, _, handlers = made()
    handlers["ref_params"].free = lambda: None
    with pytest.raises(MemoryLedgerError, match=r"entering advantage: ref_params .* after ref \(free\)"):
        step(scheduler)


VLLMS = ("rollout_weights", "kv_cache")


def test_what_vllm_moves_comes_in_the_place_that_the_table_has(made):
    scheduler, log, handlers = made(tuple(group for group in SIZES if group not in VLLMS))
    scheduler.begin("reshard", lambda: log.append("wake weights"))
    scheduler.begin("wake_kv", lambda: log.append("wake cache"))
    scheduler.begin("rollout", lambda: log.append("never"))
    scheduler.begin("sleep", lambda: log.append("sleep"))
    assert log == [
        "load actor_params",
        "wake weights",
        "alloc reshard_buffers",
        "free reshard_buffers",
        "offload actor_params",
        "empty_cache",
        "wake cache",
        "alloc tensor_cache",
        "sleep",
        "empty_cache",
    ]


def test_a_wake_that_fails_leaves_nothing_that_the_next_step_meets(made):
    scheduler, log, _ = made(tuple(group for group in SIZES if group not in VLLMS))

    def fail():
        raise MemoryError("no memory for the cache")

    scheduler.begin("reshard", lambda: None)
    with pytest.raises(MemoryError):
        scheduler.begin("wake_kv", fail)
    log.clear()
    scheduler.begin("reshard", lambda: None)
    assert log == ["load actor_params", "alloc reshard_buffers"]


def test_a_second_generation_and_a_step_without_an_update_leave_the_table_true(made):
    """REMAX and validation generate again; a critic's warm-up updates nothing. The ledger is strict."""
    scheduler, log, handlers = made()
    again = ("reshard", "wake_kv", "rollout", "sleep")
    step(scheduler)
    handlers["tensor_cache"].free()
    for phase in (*again, "old_log_prob", "ref"):
        scheduler.begin(phase)
    scheduler.end()
    handlers["tensor_cache"].free()  # its scope ends with the step (trainer/tensor_cache.py, end_step)
    log.clear()
    step(scheduler)
    assert "load actor_params" in log and log.index("offload actor_params") < log.index("alloc kv_cache")


def test_trims_are_on_record_and_a_context_without_a_scheduler_tells_the_ledger_alone(made):
    scheduler, log, _ = made(())
    counters.take_moves()
    step(scheduler)
    assert [each["verb"] for each in counters.take_moves()] == ["empty_cache", "empty_cache"] == log
    alone = WorkerContext(ledger=scheduler.ledger)
    alone.begin("rollout", lambda: log.append("vllm"))
    alone.look()
    assert log[2:] == ["vllm"]
    assert [r["phase"] for r in scheduler.ledger.take()["records"]][-1] == "rollout"
    WorkerContext(scheduler=scheduler).begin("sleep")
    assert log[3:] == ["empty_cache"]
    nothing = WorkerContext()
    with nothing.phase("no such phase"):
        nothing.look()
    nothing.begin("rollout", lambda: log.append("vllm again"))
    assert log[4:] == ["vllm again"]


def test_a_phase_around_work_that_failed_stays_open_until_the_next_begins(made):
    scheduler, log, _ = made(("ref_params",))
    here = WorkerContext(scheduler=scheduler, ledger=scheduler.ledger)
    with here.phase("ref"):
        here.look(extra_bytes=50)
    assert log[-1] == "free ref_params" and scheduler.ledger.take()["records"][0]["peak_bytes"] == 450
    with pytest.raises(RuntimeError, match="no more"), here.phase("ref"):
        raise RuntimeError("no more")
    assert log[-1] == "load ref_params"
    here.begin("update")
    assert log[-1] == "free ref_params"


def test_what_stays_is_not_moved_though_it_has_a_mover(made):
    scheduler, _, _ = made(stays={"grads"})
    assert scheduler.moves("optimizer") and not scheduler.moves("grads")
    scheduler, _, _ = made(("grads",))
    assert scheduler.moves("grads") and not scheduler.moves("optimizer")


def test_unknown_names_are_refused(made):
    with pytest.raises(ConfigError, match="handlers for gards"):
        made()[0].add({"gards": None})
    with pytest.raises(ConfigError, match="no phase 'x'"):
        made()[0].begin("x")


@pytest.mark.parametrize(
    ("settings", "own_sleep_mode", "taken"),
    [
        ("expandable_segments:True", True, "light"),
        ("max_split_size_mb:128, expandable_segments:true", True, "light"),
        ("expandable_segments:True", False, "full"),  # vLLM's sleep mode takes memory past the pool
        ("expandable_segments:False", True, "full"),  # the light form raises there
        (None, True, "full"),
    ],
)
def test_the_light_form_of_empty_cache_is_taken_only_where_it_works_and_suffices(
    settings, own_sleep_mode, taken, monkeypatch
):
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    if settings:
        monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", settings)
    assert empty_cache_of(SimpleNamespace(empty_cache="full", empty_virt_addr_cache="light"), own_sleep_mode) == taken
    assert empty_cache_of(SimpleNamespace(empty_cache="full"), own_sleep_mode) == "full"
    assert empty_cache_of(None, own_sleep_mode)() is None
    assert empty_cache_of(torch.cuda, own_sleep_mode) is torch.cuda.empty_cache


def test_what_fails_does_not_keep_the_rest_from_going(made):
    def fail():
        raise MemoryError("no host memory")

    scheduler, log, handlers = made(("actor_params", "grads", "optimizer"))
    scheduler.begin("update")
    handlers["optimizer"].offload = fail
    log.clear()
    with pytest.raises(MemoryError, match="no host memory"):
        scheduler.end()
    assert log == ["free grads"]
    scheduler, log, handlers = made(("actor_params", "grads", "optimizer"))
    handlers["actor_params"].load = fail
    with pytest.raises(MemoryError, match="no host memory"):
        scheduler.begin("update")
    assert log == []  # nothing more comes after an error


def test_what_the_schedule_has_on_the_device_now(made):
    scheduler, _, _ = made()
    assert not scheduler.has("optimizer")
    scheduler.begin("update")
    assert scheduler.has("optimizer") and scheduler.has("actor_params")
    scheduler.end()
    assert not scheduler.has("optimizer") and scheduler.has("actor_params")


def test_what_stands_for_torch_travels_as_verls_functions_do(monkeypatch):
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    found = cloudpickle.loads(cloudpickle.dumps(without_empty_cache(torch)))
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    found.cuda.empty_cache()
    assert calls == ["empty_cache"] and found.Tensor is torch.Tensor and found.cuda.Stream is torch.cuda.Stream
    monkeypatch.setattr(contexts, "_context", WorkerContext(scheduler=object()))
    found.cuda.empty_cache()
    assert calls == ["empty_cache"]
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018
