"""An order carried out on real storages: exactly the table's moves, in its order, each followed by the ledger."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.memory import ledger as ledgers
from verl_patches.memory.conduct import Conductor, trim_of
from verl_patches.memory.ledger import Ledger, MemoryLedgerError
from verl_patches.memory.measure import held_bytes
from verl_patches.memory.phases import OURS, simulate

SIZES = {"actor_params": 400, "grads": 800, "optimizer": 2400, "ref_params": 400, "rollout_weights": 600,
         "kv_cache": 1000, "reshard_buffers": 100, "swap_window": 10, "tensor_cache": 20}  # fmt: skip


class Buffer:
    """A mover of one storage, which counts what it copies and notes each move that did something."""

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
    def make(tenants=tuple(SIZES), stays=()):
        log = []
        movers = {tenant: Buffer(tenant, log) for tenant in tenants}
        ledger = Ledger(OURS, stays, "strict")
        for tenant, mover in movers.items():
            ledger.register(tenant, lambda mover=mover: held_bytes([mover.device], "cpu"), full_bytes=SIZES[tenant])
        monkeypatch.setattr(ledgers, "_CURRENT", ledger)
        return Conductor(OURS, movers, lambda: log.append("trim"), stays), log, movers

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
    assert all(peaks[m.phase] <= m.peak_bytes for m in moments) and peaks["update"] == 400 + 800 + 2400 + 10 + 20
    movers["optimizer"].load()
    assert torch.equal(movers["optimizer"].device, torch.arange(2400).to(torch.uint8))  # there and back, unchanged


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


def test_unknown_names_are_refused(made):
    with pytest.raises(ConfigError, match="movers for gards"):
        Conductor(OURS, {"gards": None}, lambda: None)
    with pytest.raises(ConfigError, match="no phase 'x'"):
        made()[0].begin("x")


def test_the_light_form_of_empty_cache_is_taken_where_there_is_one():
    full, light = object(), object()
    assert trim_of(SimpleNamespace(empty_cache=full)) is full
    assert trim_of(SimpleNamespace(empty_cache=full, empty_virt_addr_cache=light)) is light
    assert trim_of(None)() is None and trim_of(torch.cuda) is torch.cuda.empty_cache
