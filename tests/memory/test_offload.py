"""Our offload over Megatron's real DDP and optimizers, on both lines: what goes, what comes back, what it takes."""

import pytest
import torch

from verl_patches.catalog import ROWS
from verl_patches.errors import ConfigError
from verl_patches.memory import host_backed
from verl_patches.memory.counters import Moved, move, offload_of_step, take_moves
from verl_patches.memory.host_backed import HostBackedStorage, load_storages, offload_storages
from verl_patches.memory.schedule import MEMORY_GROUPS
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches

LINES = ["pypi", pytest.param("a3", marks=pytest.mark.upstream)]
PARTS = (
    "models",
    "optimizers",
    "spoilt",
    "counted",
    "checkpoints",
    "checkpoints_as_scheduled",
    "checkpoints_without_states_before",
    "watched",
    "carried_out",
)
EMPTY = dict.fromkeys(("dense param", "dense grad", "expert param", "expert grad"), 0)
KINDS = ("fp32", "bf16", "plain fp32", "plain bf16")


@pytest.fixture(params=LINES)
def found(request, offload_job):
    return offload_job(*PARTS, line=request.param)[0]


def names(moved):
    return [f"{each['verb']} {each['group']}" for each in moved]


@pytest.mark.slow
def test_nothing_stays_and_everything_comes_back_where_it_was(found):
    models = found["models"]
    assert models["at first"] == models["loaded"] and all(models["loaded"].values())
    assert models["offloaded"] == EMPTY and models["reference"] == 0
    for kept in ("weights are back", "weights are back again", "views are of the same memory", "training is kept"):
        assert models[kept], kept
    assert models["for log-probs"] == {**models["loaded"], "dense grad": 0, "expert grad": 0}
    assert set(models["gradients"]) == set(models["gradients of the next step"]) == {0}


@pytest.mark.slow
def test_gradients_are_never_copied_and_what_was_only_read_does_not_go_back(found):
    models = found["models"]
    assert names(models["moves for log-probs"]) == [
        "load actor_params",
        "load actor_params",
        "load ref_params",
        "free actor_params",
        "free actor_params",
        "free ref_params",
    ]
    assert set(names(models["moves of training"])) == {
        "load actor_params",
        "alloc grads",
        "free grads",
        "offload actor_params",
    }
    for each in models["first moves"] + models["moves for log-probs"] + models["moves of training"]:
        assert each["copied_bytes"] == (each["bytes"] if each["verb"] in ("load", "offload") else 0)
    assert sum(each["host_bytes"] for each in models["moves of training"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_steps_as_without_with_one_copy_a_byte_and_no_new_host_memory(found, kind):
    seen = found["optimizers"][kind]
    assert seen["equal"] == [True] * 3 and seen["left"] == 0
    assert seen["classes"] == [
        {"plain fp32": "FP32Optimizer", "plain bf16": "Float16OptimizerWithFloat16Params"}.get(
            kind, "DistributedOptimizer"
        )
    ]
    assert [step["copies_per_byte"] for step in seen["steps"]] == [1, 1, 1]
    assert seen["steps"][0]["host_bytes"] > 0 == seen["steps"][1]["host_bytes"] == seen["steps"][2]["host_bytes"]
    assert [step["host_allocations"] for step in seen["steps"][1:]] == [0, 0]
    moved = seen["steps"][2]["moves"]
    assert moved["load optimizer"]["bytes"] == moved["offload optimizer"]["bytes"] > 0
    assert moved["free grads"] == {**moved["alloc grads"], "copied_bytes": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_storage", ("expert_parallel_buffers[0].param_data", "of 512 bytes", "another one of 512 bytes")),
        ("other_size", ("buffers[0].param_data, which is offloaded", "expected a storage of 0 bytes, found 12")),
        ("emptied", ("grads, buffers[0].grad_data", "at least 1,536 bytes, found 0")),
        ("written_reference", ("ref_params, bias", "host copy is stale", "load_grad=True")),
        ("gradient_without_ddp", ("weight of a model without DDP has a gradient",)),
        ("state_of_other_size", ("group 0, parameter 0, exp_avg_sq", "expected a storage of 0 bytes, found 4")),
    ],
)
def test_what_is_not_as_it_was_left_is_refused_by_name(found, case, words):
    said = found["spoilt"][case]
    assert said.startswith("RecipeError: offload: ") and all(word in said for word in words), said


@pytest.mark.slow
def test_our_account_is_what_was_done_and_a_copied_gradient_shows(found):
    """The count from outside sees each tensor's copies and allocations; the control copies gradients too."""
    for number, step in enumerate(found["counted"]["as it is"]):
        assert step["seen"] == step["told"] == step["plan"] > 0 and step["seen host"] == step["told host"]
        assert (step["seen host"] == 0) == (number > 0)
    for step in found["counted"]["gradients copied"]:
        assert step["seen"] > step["plan"] and step["seen host"] > step["told host"]


@pytest.mark.slow
def test_checkpoints_find_the_states_and_loaded_ones_use_the_same_host_memory(found):
    assert found["checkpoints"] == {
        "away": 0,
        "saved": True,
        "away again": 0,
        "host memory for the loaded ones": 0,
        "loaded": True,
    }


@pytest.mark.slow
def test_a_checkpoint_finds_scheduled_weights_and_leaves_them_where_they_were(found):
    """Row memory.order: what was loaded into them is copied to the host, what was read is not."""
    scheduled = found["checkpoints_as_scheduled"]
    assert scheduled["saved"] and scheduled["loaded"] and scheduled["held"] == EMPTY
    assert scheduled["verl moves"] == [False, False]
    there, back = ["load actor_params"] * 2 + ["load optimizer"], ["offload optimizer"]
    assert scheduled["moves as built"] == ["free grads"] * 2 + ["offload actor_params"] * 2 + back
    assert scheduled["save moves"] == there + ["free actor_params"] * 2 + back
    assert scheduled["load moves"] == there + ["offload actor_params"] * 2 + back
    assert scheduled["save moves while all is there"] == []


@pytest.mark.slow
def test_states_that_a_checkpoint_makes_go_to_the_host_where_the_schedule_has_them(found):
    states = found["checkpoints_without_states_before"]
    full = states["stays"][0]
    assert states["moved"] == [full, 0, full] and states["swapped"] == [full, 0]
    assert states["stays"] == [full, full, full] and full  # negative control: optimizer_offload=false


@pytest.mark.slow
def test_every_group_of_a_worker_is_watched_and_what_a_sync_or_a_swapped_step_leaves_is_seen(found):
    whole, swapped = found["watched"]["whole"], found["watched"]["swapped"]
    assert set(whole["groups"]) == set(swapped["groups"]) == set(MEMORY_GROUPS) - {"tensor_cache"}  # CachedBatch's
    assert whole["absorbed"] == 2 * 4 * 6 * 4  # W_UK_T is a view of the weight, W_UV a copy
    assert "reshard_buffers" in whole["leaks"][0] and "holds 5 bytes, expected 0" in whole["leaks"][0]
    assert "swap_window" in swapped["leaks"][1] and whole["leaks"][1] == ""
    assert 0 < swapped["in the update"] < whole["in the update"]
    assert "kv_cache" in whole["unmapped"] and "holds 0 bytes" in whole["unmapped"]  # its storages are still there


@pytest.mark.slow
def test_an_executed_schedule_moves_what_its_simulation_says(found):
    schedule = found["carried_out"]
    for way in ("to_device", "to_host"):
        assert schedule[way][0] == schedule[way][1] > 0
    assert "free ref_params" in schedule["moves"] and "offload ref_params" not in schedule["moves"]
    assert schedule["moves"].count("load actor_params") == 2  # two chunks, once a step


@pytest.mark.slow
@pytest.mark.upstream
def test_verl_54c9b736_alone_leaves_the_experts(offload_job):
    left = offload_job("verl_alone", line="a3")[0]["verl_alone"]
    assert left["dense param"] == left["dense grad"] == 0 < left["expert param"] and left["expert grad"] > 0


@pytest.mark.parametrize("line", ["pypi", "a3"])
@pytest.mark.parametrize(
    "needed", ["update.recipe_worker", "rollout.engine", "update.sharding_manager", "memory.empty_cache"]
)
def test_a_schedule_whose_phases_are_not_seen_is_refused(line, needed):
    """Without gradients on the device an update would write where there is no memory."""
    assert "memory.order" in Engine(ROWS, Switches(line, "npu")).wanted
    assert needed in next(row for row in ROWS if row.id == "memory.order").needs
    with pytest.raises(ConfigError, match=f"needs {needed}, which is off"):
        Engine(ROWS, Switches(line, "npu", (f"-{needed}",)))


def test_a_large_storage_takes_several_pieces_and_comes_back(monkeypatch):
    monkeypatch.setattr(host_backed, "PIECE_BYTES", 1024)
    monkeypatch.setattr(
        host_backed,
        "_allocate",
        lambda size, device, made=[]: made.append(size) or torch.empty(size, dtype=torch.uint8),
    )
    made = host_backed._allocate.__defaults__[0]
    tensors = [torch.randn(size) for size in (3, 700, 1, 60)]
    before = [tensor.clone() for tensor in tensors]
    storages = [HostBackedStorage(str(number), tensor) for number, tensor in enumerate(tensors)]
    for each in storages:
        each.device = torch.device("meta")  # no CPU: pieces are shared
    host_backed._make_host_memory(storages)
    assert made[0] == 0 and made[1:] == [1024, 1024, 1024, 1024, 512]
    spans = sorted((piece.data_ptr(), piece.numel()) for each in storages for piece in each.host)
    assert all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:], strict=False))
    for each in storages:
        each.device = torch.device("cpu")
        each.offload(copy=True)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    load_storages(storages)
    assert all(map(torch.equal, tensors, before))


def test_a_stale_host_copy_is_what_comes_back():
    """Negative control for copying at all: a storage that leaves without a copy brings back what was there before."""
    tensor = torch.ones(4)
    storages = [HostBackedStorage("t", tensor)]
    offload_storages(storages, copy=False)  # the first time there is nothing on the host yet: copied
    load_storages(storages)
    assert tensor.tolist() == [1] * 4
    tensor.add_(1)
    offload_storages(storages, copy=False)
    load_storages(storages)
    assert tensor.tolist() == [1] * 4
    tensor.add_(1)
    offload_storages(storages)
    load_storages(storages)
    assert tensor.tolist() == [2] * 4


def moved(verb, group, size, **other):
    return {**vars(Moved(verb, group, size)), **other}


def test_a_steps_account_is_of_the_busiest_rank():
    one = [
        moved("load", "actor_params", 100, copied_bytes=100),
        moved("alloc", "grads", 200),
        moved("offload", "actor_params", 100, copied_bytes=100),
    ]
    other = [moved("load", "actor_params", 60, copied_bytes=120, host_allocations=2, host_bytes=60, peak_bytes=7)]
    found = offload_of_step([one, other])
    assert found["moves"]["load actor_params"] == {"count": 1, "bytes": 100, "copied_bytes": 100}
    assert found["to_device_bytes"] == {"max": 120, "mean": 110} and found["to_host_bytes"] == {"max": 100, "mean": 50}
    assert found["copies_per_byte"] == 2 and (found["host_allocations"], found["host_bytes"]) == (2, 60)
    assert found["swap_peak_bytes"] == 7 and offload_of_step([[], []]) is None


def test_what_ranks_did_one_after_the_other():
    one = [moved("load", "actor_params", 1), moved("load", "actor_params", 2), moved("empty_cache", "", 0)]
    other = [moved("empty_cache", "", 0), moved("empty_cache", "", 0), moved("load", "actor_params", 3)]
    found = offload_of_step([one, other, one])
    assert found["sequences"] == [
        ["load actor_params", "empty_cache"],
        ["empty_cache", "empty_cache", "load actor_params"],
    ]
    assert found["moves"]["load actor_params"]["count"] == 2
    assert offload_of_step([[moved("empty_cache", "", 0)]]) is None


def test_a_move_of_nothing_is_no_move():
    take_moves()
    with move("load", "grads"):
        pass
    with move("load", "grads") as found:
        found.bytes, found.verb = 5, "alloc"
    assert [(each["verb"], each["bytes"]) for each in take_moves()] == [("alloc", 5)] and take_moves() == []
