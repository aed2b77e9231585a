"""Load weights on a rank in the tests of loading."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from verl_patches.errors import RecipeError
from verl_patches.layout.parallel import parse_layout
from verl_patches.reshard.region import Region
from verl_patches.weights import load
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source

LIMIT_S, READS = 3600.0, 3


class SlowClock:
    """Stand in for `time`: each sleep lasts more than the limit, and rank 1 has read a byte when it ends."""

    def __init__(self, store: dist.Store):
        self.store, self.now, self.slept = store, 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.slept == READS:  # the last rank arrives
            time.sleep(seconds)
            return
        self.now += LIMIT_S + 1
        self.store.set(f"slept/{self.slept}", "")
        self.store.wait([f"read/{self.slept}"])
        self.slept += 1


def wait_job() -> dict[str, object]:
    """Return rank 0's error while no other rank reads, and whether it waits for rank 1, which reads now and then."""
    rank, found, store = dist.get_rank(), {}, dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            load.wait_for_ranks("FOLDER", "late", 0)
        except RecipeError as error:
            found["late"] = str(error)
        load.time = SlowClock(store)
    if rank == 1:
        load.TELL_S, count = 0.0, load.read_counter("all")
        for number in range(READS):
            store.wait([f"slept/{number}"])
            count(1)
            store.set(f"read/{number}", "")
        store.set("the last rank arrives", "")
    load.wait_for_ranks("FOLDER", "all", LIMIT_S)
    return found | {"waited": store.check(["the last rank arrives"])}


def _build(folder: Path, dtype: torch.dtype = torch.float32, with_ddp: bool = False):
    from tests.model.megatron_model import build_model

    return build_model(folder, dtype, load=False, wrap_with_ddp=with_ddp)[0]


def _named_values(chunks) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in load._named_tensors(chunks)}


def _unequal_names(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [n for n in found if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])]


def folders_job(folders: dict[str, Path], layouts: list[str], layers: int) -> dict[str, object]:
    """Return {layout: {folder: (names of parameters that differ from those of folder "bf16", bytes read)}}.

    "layout given" is folder "bf16" again, by ranks that know their layout and make no collective before they wait.
    """
    from tests.model.megatron_model import start_parallel
    from verl_patches.weights.load import load_weights

    def read(folder: Path, key: str, layout=None):
        chunks = _build(folders["bf16"])
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.fill_(torch.nan)
        read_bytes = load_weights(folder, chunks, key=key, layout=layout)
        return _named_values(chunks), read_bytes

    def refused(*_, **__):
        raise AssertionError("a collective before the wait")

    found: dict[str, object] = {}
    for name in layouts:
        layout = parse_layout(name)
        start_parallel(layout)
        expected, _ = read(folders["bf16"], f"{name}/first")
        placed = replace(layout, layers_per_stage=tuple(map(len, layout.chunk_layers(layers))))
        results = {folder: read(path, f"{name}/{folder}") for folder, path in folders.items()}
        gather, dist.all_gather_object = dist.all_gather_object, refused
        try:
            results["layout given"] = read(folders["bf16"], f"{name}/given", placed)
        finally:
            dist.all_gather_object = gather
        found[name] = {folder: (_unequal_names(values, expected), size) for folder, (values, size) in results.items()}
    return found


def copies_job(folder: Path, other: Path) -> dict[str, object]:
    """Load a second model that copies from the first; each result is (parameters that differ, bytes read)."""
    from tests.model.megatron_model import start_parallel
    from verl_patches.memory.offload import Params
    from verl_patches.worker.models import copy_source, load_model

    start_parallel(parse_layout("tp2 @2"))

    def load(chunks, path=folder):
        return load_model(str(path), chunks, "pypi", 60.0)

    def load_second(dtype=torch.float32, with_ddp=True, path=folder):
        chunks = _build(folder, dtype, with_ddp)
        size = load(chunks, path)
        return _unequal_names(_named_values(chunks), read[dtype]), size

    read: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        chunks = _build(folder, dtype, with_ddp=True)
        load(chunks)
        read[dtype] = _named_values(chunks)
    found = {"actor after an actor": load_second()}
    reference = _build(folder)
    found["reference"] = _unequal_names(_named_values(reference), read[torch.float32]), load(reference)
    found["actor"] = load_second()
    params = Params(reference)
    params.offload()
    found["actor after offload"] = load_second()
    params.load()
    found["another folder"] = load_second(path=other)
    found["bf16"] = load_second(torch.bfloat16)
    copy_source.value = str(folder), reference
    with torch.no_grad():
        next(iter(reference[0].parameters())).add_(1)
    found["control"] = load_second()
    return found


def peak_job(folder: Path, by_regions: bool) -> int:
    """Return the growth of the process's peak bytes while bf16 targets, or, as a control, whole files are read."""
    source = open_source(folder)
    targets = {name: torch.ones(t.shape, dtype=torch.bfloat16) for name, t in source.tensors.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if by_regions:
        with WeightReader(source) as reader:
            for name, target in targets.items():
                reader.copy(Region(name, 0, 0, target.shape[0]), target)
    else:
        held = [(folder / name).read_bytes() for name in {t.parts[0].file for t in source.tensors.values()}]
        assert held
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
