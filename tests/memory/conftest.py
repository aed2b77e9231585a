"""Make memory groups of real storages, which a scheduler moves and a ledger measures."""

import pytest
import torch

from verl_patches.memory.ledger import Ledger
from verl_patches.memory.measure import held_bytes
from verl_patches.memory.schedule import SCHEDULE
from verl_patches.memory.scheduler import Scheduler

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
    """Handle one storage and log each move that has an effect."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        self.device = torch.zeros(SIZES[name], dtype=torch.uint8)
        self.host = torch.arange(SIZES[name], dtype=torch.int64).to(torch.uint8)
        self.resize(0)

    def resize(self, size):
        self.device.untyped_storage().resize_(size)

    def _resize(self, size, verb):
        changes = self.device.untyped_storage().nbytes() != size
        if changes:
            self.resize(size)
            self.log.append(f"{verb} {self.name}")
        return changes

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
def make_scheduler():
    """Return make_scheduler(groups, unmoved_groups) -> (scheduler, log of moves, handlers), with a strict ledger."""

    def make(groups=tuple(SIZES), unmoved_groups=(), schedule=SCHEDULE, action="strict", rank=0):
        log = []
        handlers = {group: Buffer(group, log) for group in groups}
        ledger = Ledger(schedule, unmoved_groups, action, rank)
        for group, handler in handlers.items():
            ledger.register(group, lambda handler=handler: held_bytes([handler.device], "cpu"), full_bytes=SIZES[group])
        scheduler = Scheduler(schedule, lambda: log.append("empty_cache"), unmoved_groups)
        scheduler.ledger = ledger
        scheduler.add(handlers)
        return scheduler, log, handlers

    return make
