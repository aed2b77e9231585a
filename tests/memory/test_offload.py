"""Offload of Megatron's real DDP and optimizers, on both lines: contents, moves, host memory and refusals."""

import pytest
import torch

from verl_patches.catalog import ROWS
from verl_patches.errors import ConfigError
from verl_patches.memory import host_backed
from verl_patches.memory.counters import TALLY, Moved, move, note_empty_cache, offload_of_step, take_moves
from verl_patches.memory.host_backed import HostBackedStorage, load_storages, offload_storages
from verl_patches.memory.schedule import MEMORY_GROUPS
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches

PARTS = (
    "models optimizers spoilt counted checkpoints checkpoints_as_scheduled checkpoints_without_states_before watched "
    "checkpoint_copies"
).split()


@pytest.fixture(params=["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def found(request, offload_job):
    return offload_job(*PARTS, line=request.param)[0]


def names(moved):
    return [f"{each['verb']} {each['group']}" for each in moved]


@pytest.mark.slow
def test_nothing_stays_on_the_device_and_contents_come_back(found):
    models = found["models"]
    assert models["at first"] == models["loaded"] and all(models["loaded"].values())
    assert not any(models["offloaded"].values()) and models["reference"] == 0
    for check in ("weights are back", "views are of the same memory", "training is kept"):
        assert models[check], check
    grads = {name: 0 for name in models["loaded"] if name.endswith("grad_data")}
    assert models["for log-probs"] == {**models["loaded"], **grads} and set(models["gradients"]) == {0}


@pytest.mark.slow
def test_gradients_and_weights_that_were_only_read_are_not_copied(found):
    models = found["models"]
    groups = ["actor_params", "actor_params", "ref_params"]
    assert names(models["moves for log-probs"]) == [f"{verb} {group}" for verb in ("load", "free") for group in groups]
    training = {"load actor_params", "alloc grads", "free grads", "offload actor_params"}
    assert set(names(models["moves of training"])) == training
    for each in models["first moves"] + models["moves for log-probs"] + models["moves of training"]:
        assert each["copied_bytes"] == (each["bytes"] if each["verb"] in ("load", "offload") else 0)
    assert sum(each["host_bytes"] for each in models["moves of training"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cls"), [
    ("fp32", "DistributedOptimizer"),
    ("bf16", "DistributedOptimizer"),
    ("plain fp32", "FP32Optimizer"),
    ("plain bf16", "Float16OptimizerWithFloat16Params"),
])  # fmt: skip
def test_an_offloaded_optimizer_steps_as_without_with_one_copy_a_byte(found, kind, cls):
    seen = found["optimizers"][kind]
    assert seen["equal"] == [True] * 3 and seen["left"] == 0 and seen["classes"] == [cls]
    assert [step["copies_per_byte"] for step in seen["steps"]] == [1, 1, 1]
    assert seen["steps"][0]["host_bytes"] > 0
    assert [step["host_allocations"] for step in seen["steps"][1:]] == [0, 0]
    moved = seen["steps"][2]["moves"]
    assert moved["load optimizer"]["bytes"] == moved["offload optimizer"]["bytes"] > 0
    assert moved["free grads"] == {**moved["alloc grads"], "copied_bytes": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), [
    ("other_storage", ("expert_parallel_buffers[0].param_data", "of 512 bytes", "another one of 512 bytes")),
    ("other_size", ("buffers[0].param_data, which is offloaded", "expected a storage of 0 bytes, found 12")),
    ("emptied", ("grads, buffers[0].grad_data", "at least 1,536 bytes, found 0")),
    ("written_reference", ("ref_params, bias", "host copy is stale", "allocate gradients")),
    ("gradient_without_ddp", ("weight of a model without DDP has a gradient",)),
    ("state_of_other_size", ("group 0, parameter 0, exp_avg_sq", "expected a storage of 0 bytes, found 4")),
])  # fmt: skip
def test_a_storage_that_other_code_changed_is_refused_by_name(found, case, words):
    error = found["spoilt"][case]
    assert error.startswith("RecipeError: offload: ") and all(word in error for word in words), error


@pytest.mark.slow
def test_recorded_bytes_are_those_of_tensor_calls(found):
    """`Counted` sees each copy and allocation; the control copies gradients too, which nothing records."""
    for number, (seen, recorded, planned, seen_host, host) in enumerate(found["counted"]["False"]):
        assert seen == recorded == planned > 0 and seen_host == host and (host == 0) == (number > 0)
    for seen, _, planned, seen_host, host in found["counted"]["True"]:
        assert seen > planned and seen_host > host


@pytest.mark.slow
def test_a_checkpoint_uses_the_host_copies_of_the_schedule(found):
    """Only weights, which the schedule leaves on the device after an update, are copied: instead of at their offload.

    What the checkpoint reads stays until that update's states are offloaded, which is why an update waits for it.
    """
    seen = found["checkpoint_copies"]
    assert seen["copied"] and seen["as trained"] and seen["while the update runs"] and not seen["after it"]
    assert [move for move in seen["moves"] if "actor_params" in move] == ["free actor_params"] * 2 + [
        "load actor_params"
    ] * 2


@pytest.mark.slow
def test_checkpoints_have_weights_and_states_which_are_offloaded_again(found):
    """Row memory.order: loaded weights are copied to the host, weights that were saved are not."""
    assert found["checkpoints"] == {"held": 0, "saved": True, "new host memory": 0, "loaded": True}
    scheduled = found["checkpoints_as_scheduled"]
    assert scheduled["saved"] and scheduled["loaded"] and not any(scheduled["held"].values())
    assert scheduled["verl moves"] == [False, False] and scheduled["save while all is on the device"] == []
    load, offload = ["load actor_params"] * 2 + ["load optimizer"], ["offload optimizer"]
    assert scheduled["built"] == ["free grads"] * 2 + ["offload actor_params"] * 2 + offload
    assert scheduled["save"] == load + ["free actor_params"] * 2 + offload
    assert scheduled["load"] == load + ["offload actor_params"] * 2 + offload
    states = found["checkpoints_without_states_before"]
    full = states["stays"][0]
    assert states["moved"] == [full, 0, full] and states["swapped"] == [full, 0]
    assert states["stays"] == [full, full, full] and full  # negative control: optimizer_offload=false


@pytest.mark.slow
def test_every_group_of_a_worker_is_watched(found):
    """Also memory that a sync or a swapped step leaves behind is seen."""
    unswapped, swapped = found["watched"]["unswapped"], found["watched"]["swapped"]
    assert set(unswapped["bytes"]) == set(swapped["bytes"]) == set(MEMORY_GROUPS) - {"tensor_cache"}  # CachedBatch's
    assert unswapped["bytes"]["rollout_weights"] == 2 * 4 * 6 * 4  # W_UK_T is a view of the weight, W_UV a copy
    assert "reshard_buffers" in unswapped["sync"] and "holds 5 bytes, expected 0" in unswapped["sync"]
    assert "swap_window" in swapped["states"] and unswapped["states"] == ""
    assert 0 < swapped["in the update"] < unswapped["in the update"]
    assert "kv_cache" in unswapped["unmapped"] and "holds 0 bytes" in unswapped["unmapped"]  # storages still exist


@pytest.mark.slow
@pytest.mark.upstream
def test_verl_54c9b736_alone_leaves_the_experts(offload_job):
    """Negative control."""
    left = offload_job("verl_alone", line="a3")[0]["verl_alone"]
    assert [name for name, size in left.items() if size] == [
        "expert_parallel_buffers param_data",
        "expert_parallel_buffers grad_data",
    ]


@pytest.mark.parametrize("line", ["pypi", "a3"])
@pytest.mark.parametrize(
    "needed", "update.recipe_worker rollout.engine update.sharding_manager memory.empty_cache".split()
)
def test_our_schedule_needs_the_rows_that_begin_its_phases(line, needed):
    """Without gradients on the device an update would write where there is no memory."""
    assert needed in next(row for row in ROWS if row.id == "memory.order").needs
    with pytest.raises(ConfigError, match=f"needs {needed}, which is off"):
        Engine(ROWS, Switches(line, "npu", (f"-{needed}",)))


def test_a_large_storage_takes_several_pieces_and_comes_back(monkeypatch):
    made, tensors = [], [torch.randn(size) for size in (3, 700, 1, 60)]
    monkeypatch.setattr(host_backed, "PIECE_BYTES", 1024)
    allocate = lambda size, device: made.append(size) or torch.empty(size, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(host_backed, "_allocate", allocate)
    before = [tensor.clone() for tensor in tensors]
    storages = [HostBackedStorage(str(number), tensor) for number, tensor in enumerate(tensors)]
    for each in storages:
        each.device = torch.device("meta")  # no CPU: pieces are shared
    host_backed._make_host_memory(storages)
    assert made == [0, 1024, 1024, 1024, 1024, 512]
    spans = sorted((piece.data_ptr(), piece.numel()) for each in storages for piece in each.host)
    assert all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:], strict=False))
    for each in storages:
        each.device = torch.device("cpu")
        each.offload(copy=True)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    load_storages(storages)
    assert all(map(torch.equal, tensors, before))


def test_a_stale_host_copy_is_what_comes_back():
    """Negative control for copying at all: without a copy the contents of the last copy come back."""
    tensor = torch.ones(4)
    storages = [HostBackedStorage("t", tensor)]
    for copy, expected in ((False, 1), (False, 1), (True, 2)):  # the first offload always copies
        offload_storages(storages, copy=copy)
        load_storages(storages)
        assert tensor.tolist() == [expected] * 4
        tensor.fill_(2)


def record(verb, group, size, **other):
    return {"verb": verb, "group": group, **dict.fromkeys(TALLY, 0), **vars(Moved(size)), **other}


def test_a_host_copy_is_found_in_all_of_its_pieces():
    tensor = torch.arange(24.0).view(4, 6)
    storage = HostBackedStorage("t", tensor)
    storage.host = list(torch.empty(96, dtype=torch.uint8).split([40, 8, 48]))
    storage.copy_to_host()
    expected, place = tensor[1:, 1:4].t().clone(), tensor[1:, 1:4].t()
    tensor.zero_()
    at = place.storage_offset()
    assert torch.equal(storage.on_host(place.dtype, place.shape, place.stride(), at), expected)


def test_the_summary_of_a_step_is_that_of_the_busiest_rank():
    one = [
        record("load", "actor_params", 100, copied_bytes=100),
        record("alloc", "grads", 200),
        record("offload", "actor_params", 100, copied_bytes=100),
    ]
    other = [record("load", "actor_params", 60, copied_bytes=120, host_allocations=2, host_bytes=60, peak_bytes=7)]
    found = offload_of_step([one, other])
    assert found["moves"]["load actor_params"] == {"count": 1, "bytes": 100, "copied_bytes": 100}
    assert found["to_device_bytes"] == {"max": 120, "mean": 110} and found["to_host_bytes"] == {"max": 100, "mean": 50}
    assert found["copies_per_byte"] == 2 and (found["host_allocations"], found["host_bytes"]) == (2, 60)
    assert found["swap_peak_bytes"] == 7 and offload_of_step([[], []]) is None


def test_orders_of_moves_are_listed_once():
    load, empty = record("load", "actor_params", 1), record("empty_cache", "", 0)
    found = offload_of_step([[load, load, empty], [empty, empty, load], [load, empty]])
    orders = [["load actor_params", "empty_cache"], ["empty_cache", "empty_cache", "load actor_params"]]
    assert found["sequences"] == orders and found["moves"]["load actor_params"]["count"] == 2
    assert offload_of_step([[empty]]) is None


def test_a_move_without_bytes_is_not_recorded():
    take_moves()
    for size in (0, 5):
        with move("load", "grads") as moved:
            moved.bytes = size
    note_empty_cache()
    assert take_moves() == [record("load", "grads", 5), record("empty_cache", "", 0)] and take_moves() == []
