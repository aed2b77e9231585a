"""A weight sync of a tiny DeepSeek-V3 on gloo ranks, and what it must give: gather everything, then slice.

Training and rollout memory is made here, as awkward as real memory is: transposed, strided, gate and up joined, experts
stacked, vocabulary padded. Values depend on name and seed only.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl_patches.layout.inventory import Inventory, ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import Shard, local_parameters
from verl_patches.reshard.execute import SyncReport, build_executor
from verl_patches.reshard.plan import ReshardPlan, plan_reshard
from verl_patches.reshard.region import Region, region_of
from verl_patches.reshard.verify import Verifier, VerifyReport

TINY = ModelShape(
    hidden_size=8, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=8, intermediate_size=16, num_attention_heads=4, kv_lora_rank=8, qk_nope_head_dim=4,
    qk_rope_head_dim=4, v_head_dim=4, vocab_size=72, q_lora_rank=8, n_shared_experts=1,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """All that decides one sync. `model`'s dtype is training's."""

    model: ModelShape
    train: ParallelLayout
    rollout: ParallelLayout
    train_library: str = "megatron-local"
    rollout_library: str = "vllm"
    rollout_dtype: str = "bfloat16"
    bucket_bytes: int = 1 << 12
    whole: tuple[str, ...] = ()
    seed: int = 0

    @property
    def inventory(self) -> Inventory:
        """In training's dtypes: what is sent."""
        return build_inventory(self.model)

    def plan(self) -> ReshardPlan:
        """The real plan."""
        return plan_reshard(
            self.inventory,
            self.train,
            self.rollout,
            train_library=self.train_library,
            rollout_library=self.rollout_library,
            bucket_bytes=self.bucket_bytes,
            whole=self.whole,
        )


class Trained(NamedTuple):
    """What a rank trains of one HF tensor, as the executor wants it (see reshard/train_tensors.py)."""

    region: Region
    tensor: torch.Tensor

    def read(self, region: Region) -> torch.Tensor:
        """A view of part of it."""
        first = self.region.start if region.axis == self.region.axis else 0
        return self.tensor.narrow(region.axis, region.start - first, region.rows)


class Live(NamedTuple):
    """A place in rollout memory (see reshard/destination.py)."""

    region: Region
    tensor: torch.Tensor
    parameter: str


class Outcome(NamedTuple):
    """What a rank tells of a sync."""

    report: SyncReport
    verified: VerifyReport
    elements: int


def full_tensor(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """The HF tensor that all ranks of a case train parts of."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def grow(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Give `module` these parameters, by name, and the modules that the names need."""
    for name, tensor in parameters.items():
        *path, key = name.split(".")
        holder = module
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, torch.nn.Module())
            holder = holder._modules[part]
        holder.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))


def cut(shard: Shard, whole: torch.Tensor) -> torch.Tensor:
    """The shard's values, without padding."""
    region = region_of(shard)
    return whole.narrow(region.axis, region.start, region.stop - region.start)


def train_memory(case: Case, rank: int) -> dict[str, Trained]:
    """The rank's training tensors: plain, transposed, or in the middle of wider memory."""
    found = {}
    shards = local_parameters(case.inventory, case.train, rank, case.train_library).shards
    for number, (name, shard) in enumerate(shards.items()):
        values = cut(shard, full_tensor(name, shard.parameter.shape, shard.parameter.dtype, case.seed))
        memory = strided(values.shape, values.dtype, number)
        memory.copy_(values)
        found[name] = Trained(region_of(shard), memory)
    return found


def strided(shape: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
    """Memory of `shape` whose strides depend on `number`."""
    if number % 3 == 1:
        return torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
    if number % 3 == 2:
        return torch.empty((*shape[:-1], 2 * shape[-1] + 3), dtype=dtype)[..., 1 : 1 + shape[-1]]
    return torch.empty(shape, dtype=dtype)


def rollout_memory(case: Case, rank: int) -> tuple[dict[str, tuple[Live, ...]], dict[str, torch.Tensor]]:
    """(HF name -> places, live parameters): gate and up joined, experts stacked, down projections transposed."""
    model = replace(case.model, torch_dtype=case.rollout_dtype)
    shards = local_parameters(build_inventory(model), case.rollout, rank, case.rollout_library).shards
    places: dict[str, tuple[Live, ...]] = {}
    live: dict[str, torch.Tensor] = {}
    experts = sorted({s.parameter.expert for s in shards.values() if s.parameter.expert is not None})
    for name, shard in shards.items():
        kind = shard.parameter.kind
        parameter, memory = name, None
        if kind.endswith(("_gate", "_up")):
            parameter = name.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")
        if shard.parameter.expert is not None:
            parameter = parameter.replace(f"experts.{shard.parameter.expert}.", "experts.")
        if parameter not in live:
            live[parameter] = _parameter(shard, len(experts))
        memory = live[parameter]
        if shard.parameter.expert is not None:
            memory = memory[experts.index(shard.parameter.expert)]
        if kind.endswith("_down"):
            memory = memory.t()
        if kind.endswith(("_gate", "_up")):
            memory = memory.chunk(2)[kind.endswith("_up")]
        region = region_of(shard)
        places[name] = (Live(region, memory.narrow(region.axis, 0, region.stop - region.start), parameter),)
    return places, live


def _parameter(shard: Shard, experts: int) -> torch.Tensor:
    shape = list(shard.shape)
    if shard.parameter.kind.endswith(("_gate", "_up")):
        shape[0] *= 2
    if shard.parameter.kind.endswith("_down"):
        shape.reverse()
    if shard.parameter.expert is not None:
        shape.insert(0, experts)
    return torch.full(shape, -7.0, dtype=getattr(torch, shard.dtype))


def gathered(case: Case, sources: Mapping[str, Trained]) -> dict[str, torch.Tensor]:
    """Every HF tensor whole, from what all ranks train, by one all_gather: the slow way that cannot be wrong."""
    held = [
        local_parameters(case.inventory, case.train, rank, case.train_library).shards
        for rank in range(case.train.world_size)
    ]
    mine = torch.cat([torch.empty(0, dtype=torch.uint8), *(bytes_of(source.tensor) for source in sources.values())])
    size = max(sum(cut_bytes(shard) for shard in shards.values()) for shards in held)
    padded = torch.nn.functional.pad(mine, (0, size - len(mine)))
    every = [torch.empty_like(padded) for _ in held]
    dist.all_gather(every, padded)
    whole: dict[str, torch.Tensor] = {}
    for shards, data in zip(held, every, strict=True):
        at = 0
        for name, shard in shards.items():
            dtype = getattr(torch, shard.dtype)
            if name not in whole:
                whole[name] = torch.zeros(shard.parameter.shape, dtype=dtype)
            part = cut(shard, whole[name])
            part.copy_(data[at : at + cut_bytes(shard)].clone().view(dtype).view(part.shape))
            at += cut_bytes(shard)
    return whole


def cut_bytes(shard: Shard) -> int:
    """Bytes of what an unpadded shard holds."""
    return shard.count * getattr(torch, shard.dtype).itemsize


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bytes, in order of elements."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def differences(
    case: Case, rank: int, whole: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> list[str]:
    """Live parameters that are not, bit for bit, what slicing the whole tensors gives (padding stays as it was)."""
    expected = rollout_memory(case, rank)
    for name, places in expected[0].items():
        for place in places:
            region = place.region
            if name not in case.whole:
                place.tensor.copy_(whole[name].narrow(region.axis, region.start, region.stop - region.start))
    return [name for name, tensor in expected[1].items() if not torch.equal(bytes_of(tensor), bytes_of(live[name]))]


def sync_and_compare(case: Case) -> Outcome:
    """One rank's part of the whole property: plan, compile, poison, sync, verify, and compare bit for bit."""
    rank = dist.get_rank()
    plan, sources = case.plan(), train_memory(case, rank)
    destinations, live = rollout_memory(case, rank)
    loaded: dict[str, torch.Tensor] = {}

    def load_whole(name: str, tensor: torch.Tensor) -> None:
        loaded[name] = tensor.clone()

    executor = build_executor(plan, rank, sources, destinations, load_whole=load_whole)
    verifier = Verifier(plan, rank, sources, destinations)
    verifier.poison()
    report, verified = executor.run(), verifier.check()
    whole = gathered(case, sources)
    wrong = differences(case, rank, whole, live)
    wrong += [
        name
        for name in case.whole
        if name in destinations and not torch.equal(bytes_of(loaded.pop(name)), bytes_of(whole[name]))
    ]
    assert not wrong, f"rank {rank}: not bit-exact: {wrong}; {case}"
    assert not loaded, f"rank {rank} was given {list(loaded)}, which it does not hold"
    scratch = sum(whole[name].nbytes for name in case.whole)
    assert report.peak_extra_bytes <= 4 * case.bucket_bytes + scratch
    return Outcome(report, verified, sum(place.tensor.numel() for places in destinations.values() for place in places))
