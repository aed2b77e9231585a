"""The ledger on real storages: what it lets pass, and that a group left, a few bytes and a wrong table are caught."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.memory.ledger import Ledger, MemoryLedgerError, memory_of_process, memory_of_step, said_of
from verl_patches.memory.measure import held_bytes, optimizer_full_bytes, optimizer_tensors
from verl_patches.memory.schedule import SCHEDULE, make_schedule

SIZES = {
    "actor_params": 400,
    "grads": 800,
    "optimizer": 2400,
    "ref_params": 400,
    "rollout_weights": 600,
    "kv_cache": 1000,
}


class Device:
    """One storage a memory group, which the table's moves resize as offload does."""

    def __init__(self, schedule=SCHEDULE, action="strict", **options):
        self.tensors = {group: torch.zeros(size, dtype=torch.int8) for group, size in SIZES.items()}
        self.ledger = Ledger(schedule, action=action, **options)
        for group, tensor in self.tensors.items():
            tensor.untyped_storage().resize_(0)
            self.ledger.register(group, lambda tensor=tensor: held_bytes([tensor], "cpu"), full_bytes=SIZES[group])
        self.schedule = schedule

    def resize(self, group, size):
        self.tensors[group].untyped_storage().resize_(size)

    def move(self, moves):
        for verb, group in moves:
            if group in self.tensors:
                self.resize(group, SIZES[group] if verb in ("load", "alloc") else 0)

    def step(self, until=None):
        for phase in self.schedule.phases:
            self.move(phase.enter)
            if phase.name == until:
                return
            self.ledger.enter(phase.name)
            self.move(phase.leave)


def test_two_steps_as_planned():
    device = Device()
    for _ in range(2):
        device.step()
    taken = device.ledger.take()
    assert taken["violations"] == [] and [r["phase"] for r in taken["records"]] == 2 * [p.name for p in SCHEDULE.phases]
    by_phase = {r["phase"]: r for r in taken["records"]}
    assert by_phase["update"]["total_bytes"] == 400 + 800 + 2400 and by_phase["wake_kv"]["bytes"]["kv_cache"] == 1000
    assert device.ledger.take() == {"records": [], "violations": []}


def test_a_group_left_behind_is_named_with_its_bytes_and_what_should_have_released_it():
    device = Device()
    device.step()
    device.resize("grads", 800)
    with pytest.raises(MemoryLedgerError) as said:
        device.step()
    for words in ("rank 0", "entering reshard", "grads", "800 bytes", "expected 0", "after update (free)", "'ours'"):
        assert words in str(said.value)
    assert device.ledger.take()["violations"] == [
        {"phase": "reshard", "group": "grads", "bytes": 800, "expected_bytes": 0}
    ]


@pytest.mark.parametrize(
    ("group", "size", "words"),
    [
        ("ref_params", 7, "holds 7 bytes, expected 0"),
        ("rollout_weights", 607, "7 bytes more than registered"),
        ("rollout_weights", 599, "released or never loaded"),
        ("kv_cache", 0, "released or never loaded"),
    ],
)
def test_a_few_bytes_are_seen(group, size, words):
    device = Device()
    device.step(until="rollout")
    device.resize(group, size)
    with pytest.raises(MemoryLedgerError, match=words.replace("(", r"\(")):
        device.ledger.enter("rollout")


def test_a_wrong_table_fails():
    device = Device()
    device.ledger = Ledger(
        make_schedule(
            "wrong",
            *(
                (
                    p.name,
                    ", ".join(m for m in map(str, p.enter) if m != "load ref_params"),
                    ", ".join(map(str, p.leave)),
                )
                for p in SCHEDULE.phases
            ),
        ),
        action="strict",
    )
    for group, tensor in device.tensors.items():
        device.ledger.register(group, lambda tensor=tensor: held_bytes([tensor], "cpu"), full_bytes=SIZES[group])
    with pytest.raises(MemoryLedgerError, match="entering ref: ref_params .* schedule 'wrong' does not have it"):
        device.step()


def test_what_stays_is_expected_everywhere():
    device = Device(stays={"ref_params"})
    with pytest.raises(MemoryLedgerError, match="entering reshard: ref_params .* holds 0 bytes, expected 400"):
        device.step()
    device.resize("ref_params", 400)
    device.ledger.enter("reshard")


def test_report_goes_on_and_keeps_what_it_saw():
    device = Device(action="report", rank=3)
    device.step(until="rollout")
    device.resize("grads", 8)
    device.ledger.enter("rollout")
    memory = memory_of_step([{"rank": 3, **device.ledger.take()}, None])
    assert memory["violations"]["count"] == 1 and memory["violations"]["first"][0]["rank"] == 3
    assert "rank 3, rollout: grads holds 8 bytes, expected 0" in said_of(memory["violations"])
    assert said_of({"count": 0, "first": []}) == "" and memory_of_step([None, None]) is None


def test_transients_and_peaks():
    seen, held = iter([{"rss": n} for n in (5, 9, 7, 1, 2, *range(9))]), {"window": 0}
    ledger = Ledger(SCHEDULE, action="strict", device_memory=seen.__next__)
    ledger.register("swap_window", lambda: held["window"], full_bytes=0, grows=True)
    ledger.enter("update")
    for held["window"], extra in ((100, 11), (60, 52), (0, 0)):
        ledger.look(extra_bytes=extra)
    ledger.enter("reshard")
    taken = ledger.take()["records"]
    assert [r["peak_bytes"] for r in taken] == [112, 0] and taken[0]["measured"] == {"rss": 9}
    held["window"] = 1
    with pytest.raises(MemoryLedgerError, match="swap_window .* holds 1 bytes"):
        ledger.enter("reshard")


def test_a_group_that_grows_is_full_once():
    held = {"optimizer": 4}
    ledger = Ledger(SCHEDULE, stays={"optimizer"}, action="strict")
    ledger.register("optimizer", lambda: held["optimizer"], full_bytes=12, grows=True)
    for size in (4, 8, 12):
        held["optimizer"] = size
        ledger.enter("update")
    for size in (8, 13):
        held["optimizer"] = size
        with pytest.raises(MemoryLedgerError, match=f"holds {size} bytes, expected 12"):
            ledger.enter("update")
    fresh = Ledger(SCHEDULE, stays={"optimizer"}, action="strict")
    fresh.register("optimizer", lambda: 13, full_bytes=12, grows=True)
    with pytest.raises(MemoryLedgerError, match="holds 13 bytes"):
        fresh.enter("update")


def test_what_varies_may_stay_until_the_schedule_releases_it():
    """As the tensor cache: other bytes in each phase and step, none after the update; REMAX generates twice."""
    held = {"now": 0}
    ledger = Ledger(SCHEDULE, action="strict")
    ledger.register("tensor_cache", lambda: held["now"], varies=True)
    for size, phase in (
        (0, "reshard"),
        (0, "rollout"),
        (7, "sleep"),
        (7, "reshard"),
        (7, "rollout"),
        (9, "sleep"),
        (5, "old_log_prob"),
        (0, "ref"),
        (3, "ref"),
        (0, "update"),
        (0, "reshard"),
    ):
        held["now"] = size
        ledger.enter(phase)
    held["now"] = 3
    for phase in ("wake_kv", "update"):  # left by the step before
        with pytest.raises(MemoryLedgerError, match=r"tensor_cache .* holds 3 bytes, expected 0"):
            ledger.enter(phase)


def test_the_size_of_a_group_without_one_is_learnt_once():
    held = {"kv_cache": 50}
    ledger = Ledger(SCHEDULE, stays={"kv_cache"}, action="strict")
    ledger.register("kv_cache", lambda: held["kv_cache"])
    ledger.enter("rollout")
    held["kv_cache"] = 51
    with pytest.raises(MemoryLedgerError, match="expected 50"):
        ledger.enter("rollout")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda ledger: ledger.register("gards", int), "'gards' is none of actor_params"),
        (lambda ledger: ledger.register("grads", int), "'grads' is registered already"),
        (lambda ledger: ledger.enter("upadte"), "has no phase 'upadte'"),
        (lambda ledger: Ledger(SCHEDULE, action="warn"), "expected one of report, strict"),
    ],
)
def test_wrong_use_is_refused(use, words):
    ledger = Ledger(SCHEDULE)
    ledger.register("grads", lambda: 0)
    with pytest.raises(ConfigError, match=words):
        use(ledger)


def test_storages_count_once_and_only_on_the_device():
    whole = torch.zeros(10)
    assert held_bytes([whole, whole[:5], [whole[2:], (None, torch.zeros(1))]], "cpu") == 44
    assert held_bytes([whole, torch.zeros(3, device="meta")], "meta") == 12
    whole.untyped_storage().resize_(0)
    assert held_bytes([whole], "cpu") == 0


def test_an_optimizers_bytes_before_and_after_its_first_step():
    """bf16 parameters have a main copy beside two moments; fp32 parameters have the moments alone."""
    main, own = torch.nn.Parameter(torch.zeros(6)), torch.nn.Parameter(torch.zeros(5))
    adam = torch.optim.AdamW([main, own])
    megatron = SimpleNamespace(shard_fp32_from_float16_groups=[[main]], shard_fp32_groups=[[own]], optimizer=adam)
    chained = SimpleNamespace(chained_optimizers=[megatron])
    assert held_bytes(optimizer_tensors(chained), "cpu") == 24
    main.grad, own.grad = torch.ones(6), torch.ones(5)
    adam.step()
    assert held_bytes(optimizer_tensors(chained), "cpu") == optimizer_full_bytes(chained) == 6 * 12 + 5 * 8


def test_on_a_device_what_the_driver_has_given_is_measured_too(monkeypatch):
    """torch's counters do not fall when vLLM's sleep mode unmaps memory past the pool."""
    free = [60, 90]
    counters = {"memory_allocated": 30, "max_memory_allocated": 35, "memory_reserved": 40}
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0), 100))
    measure = memory_of_process("cuda")
    assert measure() == {"allocated": 30, "peak": 35, "reserved": 40, "used": 40} and measure()["used"] == 10
    assert set(memory_of_process("cpu")()) == {"rss"}


def test_the_module_needs_no_torch(run_python):
    assert memory_of_process("cpu")()["rss"] > 1e6
    code = "import sys, verl_patches.memory.ledger, verl_patches.memory.expected; sys.exit('torch' in sys.modules)"
    run_python(code).check()
