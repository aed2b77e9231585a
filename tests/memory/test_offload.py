"""Test offload of Megatron's real DDP and optimizers, on both lines: contents, moves, host memory and refusals."""

import functools
import os

import pytest
import torch

from verl_patches.catalog import ROWS
from verl_patches.memory import host_backed
from verl_patches.memory.counters import offload_summary
from verl_patches.memory.host_backed import HostBackedStorage, load_storages, offload_storages

CASES = """
    nothing_stays_on_the_device_and_only_what_was_written_is_copied
    an_offloaded_optimizer_steps_as_without_with_one_copy_a_byte
    a_storage_that_other_code_changed_is_refused_by_name
    what_a_resume_reads_is_offloaded_again
    a_checkpoint_uses_the_host_copies_of_the_schedule
    every_group_of_a_worker_is_watched
""".split()
LINES = ["pypi", pytest.param("a3", marks=pytest.mark.upstream)]


@pytest.fixture(scope="module")
def failures(run_ranks, a3_sources):
    """Return failures(line) -> {function: its traceback, "" if it passes}."""

    @functools.cache
    def run(line):
        env = {"PYTHONPATH": os.pathsep.join(map(str, a3_sources("verl", "Megatron-LM")))} if line == "a3" else None
        off = ("-update.engine_start",) if line == "a3" else ()  # no MindSpeed here
        patches = ",".join((f"line={line},platform=cpu", *off))
        return run_ranks("tests.memory.offload_job:failures", CASES, size=1, patches=patches, env=env)[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("line", LINES)
def test_on_a_rank(failures, line, name):
    found = failures(line)[name]
    assert not found, found


def test_our_schedule_needs_the_rows_that_begin_its_phases():
    """Check this because without gradients on the device an update would write where there is no memory."""
    needed = "update.recipe_worker rollout.engine update.sharding_manager memory.empty_cache checkpoint.parts"
    assert set(needed.split()) <= set(next(row for row in ROWS if row.id == "memory.order").needs)


def test_a_large_storage_takes_several_pieces_and_comes_back(monkeypatch):
    made, tensors = [], [torch.randn(size) for size in (3, 700, 1, 60)]
    monkeypatch.setattr(host_backed, "PIECE_BYTES", 1024)
    allocate = lambda size, device: made.append(size) or torch.empty(size, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(host_backed, "_allocate", allocate)
    before = [tensor.clone() for tensor in tensors]
    place = tensors[1].view(100, 7)[1:, 1:4].t()
    stored = place.clone()
    storages = [HostBackedStorage(str(number), tensor) for number, tensor in enumerate(tensors)]
    for each in storages:
        each.device = torch.device("meta")  # on a device, storages share pieces
    host_backed._make_host_memory(storages)
    assert made == [0, 1024, 1024, 1024, 1024, 512]
    spans = sorted((piece.data_ptr(), piece.numel()) for each in storages for piece in each.host)
    assert all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:], strict=False))
    for each in storages:
        each.device = torch.device("cpu")
        each.offload(copy=True)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert len(storages[1].host) > 1
    assert torch.equal(
        storages[1].host_tensor(place.dtype, place.shape, place.stride(), place.storage_offset()), stored
    )
    load_storages(storages)
    assert all(map(torch.equal, tensors, before))


def test_a_stale_host_copy_is_what_comes_back():
    """Check as a negative control that without a copy the contents of the last copy come back."""
    tensor = torch.ones(4)
    storages = [HostBackedStorage("t", tensor)]
    for copy, expected in ((False, 1), (False, 1), (True, 2)):  # the first offload always copies
        offload_storages(storages, copy=copy)
        load_storages(storages)
        assert tensor.tolist() == [expected] * 4
        tensor.fill_(2)


def test_the_summary_of_a_step_is_that_of_the_busiest_rank_and_lists_orders_of_moves_once():
    load, alloc, back, empty, other = (
        {"verb": verb, "group": group, "bytes": size}
        for verb, group, size in (
            ("load", "actor_params", 100),
            ("alloc", "grads", 200),
            ("offload", "actor_params", 100),
            ("empty_cache", "", 0),
            ("load", "actor_params", 60),
        )
    )
    found = offload_summary([[load, alloc, back], [other], [other]])
    assert found["moves"]["load actor_params"] == {"count": 1, "bytes": 100}
    assert found["sequences"] == [["load actor_params", "alloc grads", "offload actor_params"], ["load actor_params"]]
    assert offload_summary([[], []]) is offload_summary([[empty]]) is None
    found = offload_summary([[load, load, empty], [empty, empty, load], [load, empty]])
    orders = [["load actor_params", "empty_cache"], ["empty_cache", "empty_cache", "load actor_params"]]
    assert found["sequences"] == orders and found["moves"]["load actor_params"]["count"] == 2
