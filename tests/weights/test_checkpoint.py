"""Test checkpoints of each rank's part, written by one layout and library and read by another, without any model.

Native parameters are packed by hand as each library packs them; optimizer shards are cut at random places, as a
distributed optimizer cuts them.
"""

import dataclasses
import json
import math
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.layout.native_parameters import STORAGES, pack
from tests.reshard.test_train_tensors import INVENTORY
from tests.runs import tiny
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.weights import checkpoint_files
from verl_patches.weights import reader as reader_module
from verl_patches.weights.checkpoint_files import (
    CheckpointError,
    TrainState,
    Walk,
    load_state,
    optimizer_shards,
    read_rank_state,
    set_step_counts,
    share_problems,
    step_counts,
    write_rank,
)
from verl_patches.weights.manifest import Manifest, rank_file_names, rank_state_file, rank_tensor_file
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source
from verl_patches.weights.writer import complete_folder, write_bytes
from verl_patches.worker import checkpoint as worker_checkpoint
from verl_patches.worker.checkpoint import WorkerCheckpoint, generator_states, set_generator_states
from verl_patches.worker.recipe_worker import RecipeWorker
from verl_patches.worker.value_worker import RecipeCriticWorker

MOMENTS = ("exp_avg", "exp_avg_sq")
BF16 = build_inventory(dataclasses.replace(INVENTORY.model, torch_dtype="bfloat16"))
BIAS = "expert_bias"
# (storage, layout that writes, layout that reads, "bf16" for a model with main parameters)
PAIRS = [
    ("local", "ep2 @4", "ep2 @4", ""),
    ("local", "ep2 @4", "tp2 etp1 ep4 @8", "bf16"),
    ("local", "tp2 etp2 ep2 @4", "pp2 @2 layers=3,1", ""),
    ("mindspeed", "@2", "tp2 etp2 ep2 @8", ""),
    ("mindspeed", "tp2 etp1 ep4 @8", "tp2 etp1 ep4 @8", "bf16"),
    ("mindspeed", "tp2 etp1 ep4 @8", "pp2 ep2 @8 layers=3,1", ""),
    ("mindspeed", "pp2 vpp2 @4 layers=1,0,2,1", "tp4 etp1 ep2 @4", "bf16"),
]


@pytest.fixture(scope="module")
def whole():
    """Return {role: {HF name: tensor}}; main parameters differ from the weights, so that a mix-up shows."""
    generator = torch.Generator().manual_seed(0)
    roles = ("weight", "main", *MOMENTS)
    return {r: {p.name: torch.randn(p.shape, generator=generator) for p in INVENTORY.parameters} for r in roles}


class Optimizer:
    """Stand in for the parts of Megatron's DistributedOptimizer that a checkpoint reads.

    `ranges`: {id of a parameter: (start, stop)}.
    """

    def __init__(self, native, ranges):
        held = [
            p for chunk in native for p in chunk.values() if id(p) in ranges and ranges[id(p)][0] < ranges[id(p)][1]
        ]
        shards = [p.view(-1)[slice(*ranges[id(p)])] for p in held]
        half, self.ranges, self.model_param_gbuf_map = [held[0].dtype == torch.bfloat16], ranges, {}
        self.model_float16_groups, self.model_fp32_groups = ([held], [[]]) if half[0] else ([[]], [held])
        mains = [shard.float() for shard in shards] if half[0] else shards
        self.shard_fp32_from_float16_groups, self.shard_fp32_groups = ([mains], [[]]) if half[0] else ([[]], [mains])
        state = {main: {} for main in mains}
        self.optimizer = SimpleNamespace(state=state, param_groups=[{"params": mains}])

    def _get_model_param_range_map(self, parameter):
        start, stop = self.ranges[id(parameter)]
        return {"param": SimpleNamespace(start=start, end=stop)}


def cut_ranges(native, layout, rank):
    """Cut each parameter at random over its replicas."""
    at, found = layout.coordinates(rank), {}
    for number, chunk in enumerate(native):
        for name, parameter in chunk.items():
            expert = ".experts." in name
            replicas, own = (layout.edp, at.edp) if expert else (layout.dp, at.dp)
            part = (at.pp, at.etp, at.ep) if expert else (at.pp, at.tp)
            cut = random.Random(
                f"{number} {name} {part if expert else part[0]}"
            )  # TP ranks cut at equal places, as in Megatron
            points = [0, *sorted(cut.randint(0, parameter.numel()) for _ in range(replicas - 1)), parameter.numel()]
            if not name.endswith(BIAS):
                found[id(parameter)] = points[own], points[own + 1]
    return found


def rank_state(whole, text, rank, storage, half, filled):
    """Return the state of one rank; not `filled`: as before a checkpoint is loaded, zeros and no moments."""
    layout = parse_layout(text)
    packed = {role: pack(tensors, INVENTORY, layout, rank, storage) for role, tensors in whole.items()}
    native = packed["weight"]
    if half:
        native = [{n: t if n.endswith(BIAS) else t.bfloat16() for n, t in chunk.items()} for chunk in native]
    optimizer = Optimizer(native, cut_ranges(native, layout, rank))
    state = TrainState(native, optimizer, BF16 if half else INVENTORY, layout, rank, STORAGES[storage][0])
    expected, names = {}, {id(p): (i, n) for i, chunk in enumerate(native) for n, p in chunk.items()}
    for shard in optimizer_shards(optimizer):
        number, name = names[id(shard.parameter)]
        cut = {role: packed[role][number][name].view(-1)[shard.start : shard.stop] for role in whole}
        expected[number, name] = {role: cut[role].clone() for role in ("main", *MOMENTS) if half or role != "main"}
        if filled:
            optimizer.optimizer.state[shard.key] |= {role: cut[role].clone() for role in MOMENTS}
            optimizer.optimizer.state[shard.key]["step"] = torch.tensor(3.0)
            if half:
                shard.key.copy_(cut["main"])
    copy = [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in native]
    if not filled:
        for tensor in (t for chunk in native for t in chunk.values()):
            tensor.zero_()
    return state, copy, expected, names


def piece_tensors(piece):
    return [place.tensor_view(piece.base) for place in piece.places]


def save(folder, whole, storage, text, half):
    layout = parse_layout(text)
    files = tuple(rank_file_names(layout.world_size))
    model = BF16.model if half else INVENTORY.model
    files = (*files, "config.json")
    folder.mkdir()
    write_bytes(folder, "config.json", json.dumps({"model_type": "deepseek_v3", **dataclasses.asdict(model)}).encode())
    for rank in range(layout.world_size):
        state, *_ = rank_state(whole, text, rank, storage, half, filled=True)
        write_rank(folder, rank, state.pieces_to_write(), piece_tensors, {"step_counts": step_counts(state.optimizer)})
    manifest = Manifest(model, text, "bf16" if half else "fp32", "x", files, facts={"step": 1})
    return complete_folder(folder, manifest)


@pytest.mark.parametrize(("storage", "saved", "resumed", "half"), PAIRS)
def test_any_layout_reads_what_another_wrote(tmp_path, whole, storage, saved, resumed, half):
    manifest = save(tmp_path / "c", whole, storage, saved, half)
    elements = Counter()
    for entry in (t for file in manifest.files for t in file.tensors):
        elements[entry.role] += math.prod(entry.shape)
    trained = sum(p.count for p in INVENTORY.parameters if p.trainable)
    every = sum(p.count for p in INVENTORY.parameters)
    assert elements == {"weight": every, **({"main": trained} if half else {}), **dict.fromkeys(MOMENTS, trained)}
    with open_reader(tmp_path / "c") as reader:
        for rank in range(parse_layout(resumed).world_size):
            state, weights, expected, names = rank_state(whole, resumed, rank, storage, half, filled=False)
            load_state(state, reader)
            set_step_counts(state.optimizer, read_rank_state(tmp_path / "c", 0)["step_counts"])
            for number, chunk in enumerate(weights):
                assert all(torch.equal(state._native[number][name], tensor) for name, tensor in chunk.items())
            for shard in optimizer_shards(state.optimizer):
                wanted = expected[names[id(shard.parameter)]]
                assert wanted.keys() == shard.states.keys()
                assert all(torch.equal(shard.states[role], tensor) for role, tensor in wanted.items())
                assert state.optimizer.optimizer.state[shard.key]["step"] == 3.0


def open_reader(folder):
    return WeightReader(open_source(folder), verify=True, read_whole=True)


def test_a_resume_in_the_same_layout_reads_every_byte_once_and_says_so_while_it_reads(tmp_path, whole, monkeypatch):
    """Compare digests in that one read (a flipped byte is named below); control: another layout reads whole parts."""
    save(tmp_path / "c", whole, "mindspeed", "tp2 etp1 ep4 @8", True)
    monkeypatch.setattr(reader_module, "_READ_BYTES", 4096)
    for text, once in (("tp2 etp1 ep4 @8", True), ("tp4 etp1 ep4 @8", False)):
        for rank in range(8):
            state, *_ = rank_state(whole, text, rank, "mindspeed", True, filled=False)
            sizes = []
            with WeightReader(open_source(tmp_path / "c"), sizes.append, verify=True, read_whole=True) as reader:
                load_state(state, reader)
            pieces = state.weight_pieces()
            pieces += [piece for shard in optimizer_shards(state.optimizer) for piece in state.shard_pieces(shard)]
            assert (sum(sizes) == sum(piece.entry.size_bytes for piece in pieces)) is once, (text, rank)
            assert max(sizes) == 4096


@pytest.fixture
def small(tmp_path, whole):
    save(tmp_path / "c", whole, "local", "ep2 @2", "")
    return tmp_path / "c"


@pytest.mark.parametrize("text", ["ep2 @2", "tp2 etp1 ep2 @2"])
@pytest.mark.parametrize("place", [-1, 0.4, 0.7])
def test_a_flipped_byte_is_named_by_a_rank_that_reads_the_tensor(small, whole, text, place):
    """Check one read, in the layout that wrote and in another, where ranks need parts of the stored tensors."""
    path = small / rank_tensor_file(1)
    data = bytearray(path.read_bytes())
    data[int(place * len(data)) if place > 0 else -1] ^= 1
    path.write_bytes(data)
    errors = []
    for rank in range(2):
        state, *_ = rank_state(whole, text, rank, "local", "", filled=False)
        try:
            with open_reader(small) as reader:
                load_state(state, reader)
        except RecipeError as error:
            errors.append(str(error))
    assert errors and all(path.name in error and "expected sha256" in error for error in errors), errors


def test_a_damaged_file_without_tensors_is_named_by_one_rank(small):
    path = small / rank_state_file(1)
    path.write_text(path.read_text() + " ")
    found = [share_problems(small, rank, 2) for rank in range(2)]
    assert sorted(map(len, found)) == [0, 1] and path.name in "".join(sum(found, []))


def test_a_state_that_is_in_no_file_is_named(small, whole):
    source, key = open_source(small), ("exp_avg", "model.embed_tokens.weight")
    source.states[key] = [stored for stored in source.states[key] if stored.file == rank_tensor_file(0)]
    state, *_ = rank_state(whole, "ep2 @2", 1, "local", "", filled=False)
    with WeightReader(source) as reader:
        with pytest.raises(
            ConfigError, match=r"exp_avg of model.embed_tokens.weight\[0:512\]: elements from \d+ are in"
        ):
            load_state(state, reader)


def test_a_walk_through_a_stack_finds_every_element_once():
    """Walk columns of width 3 in lines of 7: the region's place in each of all ranges of the parameter."""
    flat, walk = torch.arange(40), Walk(offset=2, width=3, step=7, size=15, columns=False)
    inside = [2 + line * 7 + place for line in range(5) for place in range(3)]
    for first in range(41):
        for last in range(first, 41):
            start, stop = walk.elements_before(first), walk.elements_before(last)
            places = walk.places(start, stop, first)
            found = [int(e) for place in places for e in place.tensor_view(flat[first:last]).flatten()]
            assert found == [at for at in inside if first <= at < last]


# ---- a worker's checkpoint


RECIPE = SimpleNamespace(platform="cpu", timeouts=SimpleNamespace(load_s=60.0))


def load_error(folder):
    """Return the error of each rank when rank 1 finds a fault and rank 2 fails."""

    def problems(folder, rank, world_size):
        if rank == 2:
            raise OSError("no disk")
        return ["rank_00001.safetensors, weight/x: expected sha256 1, found 2"] * (rank == 1)

    checkpoint = WorkerCheckpoint(SimpleNamespace(recipe=RECIPE))
    checkpoint.train_state = SimpleNamespace(layout="ep4 @4")
    with mock.patch.object(checkpoint_files, "share_problems", problems):
        try:
            checkpoint.load(folder)
        except CheckpointError as error:
            return str(error)


def test_a_fault_on_one_rank_is_an_error_on_all(ranks4):
    first, *others = ranks4.run(load_error, "/c/global_step_2")
    assert others == [first] * 3
    assert "/c/global_step_2 cannot be resumed from" in first and "rank 2: OSError: no disk" in first
    assert "rank 1: rank_00001.safetensors, weight/x: expected sha256 1" in first


def arrivals_at_collectives(folder):
    """Return how many ranks had read when this one began each collective of a load; rank 1 is the last to read."""
    found, store = [], dist.distributed_c10d._get_default_store()

    def problems(folder, rank, world_size):
        if rank == 1:
            time.sleep(0.5)
        store.add(f"{folder}/ended", 1)
        return []

    def collective(*given):
        found.append(store.add(f"{folder}/ended", 0))
        raise StopIteration

    checkpoint = WorkerCheckpoint(SimpleNamespace(recipe=RECIPE))
    checkpoint.train_state = SimpleNamespace(layout="ep4 @4")
    patches = (checkpoint_files, "share_problems", problems), (worker_checkpoint, "raise_on_any_rank", collective)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        with pytest.raises(StopIteration):
            checkpoint.load(folder)
    return found


def test_ranks_of_slow_disks_are_not_waited_for_in_a_collective(ranks4):
    """Check this because HCCL would end the collective: its limit is independent of recipe.timeouts.load_s."""
    assert ranks4.run(arrivals_at_collectives, "/c/global_step_3") == [[4]] * 4


class UpdatedByVerl:
    """Stand in for verl's workers, whose updates change the tensors that a checkpoint has copied or still reads."""

    def update_critic(self, data):
        data.append("updated")
        self.begun.set()
        return SimpleNamespace(meta_info={"metrics": {}})

    update_actor = update_critic


@pytest.mark.parametrize(("ours", "update"), [(RecipeCriticWorker, "update_critic"), (RecipeWorker, "update_actor")])
def test_no_update_begins_while_this_ranks_part_is_being_written(ours, update):
    """Hold the writing thread until the update begins; it goes on by itself if the update waits, as it should."""
    order, worker = [], object.__new__(type(ours.__name__, (ours, UpdatedByVerl), {}))
    worker.begun, worker.step_guard, worker.config = threading.Event(), None, OmegaConf.create({"actor": {}})
    worker.run, worker.recipe = tiny(), tiny().recipe
    worker.checkpoint = WorkerCheckpoint(worker)
    worker.checkpoint._write_future = worker.checkpoint._threads.submit(
        lambda: worker.begun.wait(1) or order.append("written")
    )
    getattr(worker, update)(order)
    assert order == ["written", "updated"]


@pytest.mark.parametrize("platform", ["cpu", "npu_emulated"])
def test_generators_go_on_where_they_were(platform):
    def draw():
        return [random.gauss(0, 1), random.random(), *np.random.randn(3), *torch.rand(3).tolist()]

    draw(), np.random.randn()
    found = json.loads(json.dumps(generator_states(platform)))
    drawn = draw()
    assert draw() != drawn
    set_generator_states(found, platform)
    assert draw() == drawn
