"""Run a weight sync of a tiny DeepSeek-V3 on gloo ranks and compare it bit for bit with slices of the HF tensors.

Training and rollout memory is made here, with the layouts of real memory: transposed, strided, gate and up joined,
experts stacked, vocabulary padded. Values depend on name and seed only.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from tests.layout.native_parameters import part
from verl_patches.layout.inventory import Inventory, ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout, rollout_layout
from verl_patches.layout.sharding import Shard, local_parameters
from verl_patches.memory.live_memory import named_tensors
from verl_patches.reshard.destination import Destinations, RolloutTensor
from verl_patches.reshard.execute import Executor, SyncReport, build_executor
from verl_patches.reshard.plan import ReshardPlan, plan_reshard
from verl_patches.reshard.region import shard_region
from verl_patches.reshard.train_tensors import TrainTensor
from verl_patches.reshard.verify import Verifier

TINY = ModelShape(
    hidden_size=8, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=8, intermediate_size=16, num_attention_heads=4, kv_lora_rank=8, qk_nope_head_dim=4,
    qk_rope_head_dim=4, v_head_dim=4, vocab_size=72, q_lora_rank=8, n_shared_experts=1,
)  # fmt: skip
FIRST = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Case:
    """Describe all that decides one sync; the dtype of `model` is training's."""

    model: ModelShape
    train: ParallelLayout
    rollout: ParallelLayout
    train_library: str = "megatron-local"
    rollout_library: str = "vllm"
    rollout_dtype: str = "bfloat16"
    bucket_bytes: int = 1 << 11
    seed: int = 0

    @property
    def inventory(self) -> Inventory:
        """Return the inventory in training's dtypes, which are sent."""
        return build_inventory(self.model)

    def plan(self) -> ReshardPlan:
        """Return the real plan."""
        libraries = dict(train_library=self.train_library, rollout_library=self.rollout_library)
        return plan_reshard(self.inventory, self.train, self.rollout, **libraries, bucket_bytes=self.bucket_bytes)


# vocabulary of 72: ranks 1 and 3 of the rollout hold 8 rows and padding
PLAIN = Case(TINY, parse_layout("tp2 pp2 ep2 etp1 @4 layers=1,2"), rollout_layout(1, dp=2, tp=2))


def full_tensor(case: Case, name: str, seed: int | None = None) -> torch.Tensor:
    """Return the whole HF tensor, of which all ranks of a case train parts."""
    parameter, seed = case.inventory.by_name[name], case.seed if seed is None else seed
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(parameter.shape, generator=generator).to(getattr(torch, parameter.dtype))


def write_through(destinations: Destinations, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write HF `tensors` into their places as a weight sync does, over NaN in all memory that is loaded."""
    memory = named_tensors(destinations.model)
    with torch.no_grad():
        for name in destinations.views:
            memory[name].fill_(float("nan"))
        for name, places in destinations.tensors.items():
            for place in places:
                place.tensor.copy_(part(tensors[name], place.region))
        for constant in destinations.constants:
            constant.target.fill_(constant.value)


def add_parameters(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Add these parameters to `module` by name, with the submodules that the names need."""
    for name, tensor in parameters.items():
        *path, key = name.split(".")
        holder = module
        for child in path:
            if child not in holder._modules:
                holder.add_module(child, torch.nn.Module())
            holder = holder._modules[child]
        holder.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))


def train_memory(case: Case, rank: int) -> dict[str, TrainTensor]:
    """Make the rank's training tensors: plain, transposed, or in the middle of wider memory."""
    sources = {}
    shards = local_parameters(case.inventory, case.train, rank, case.train_library).shards
    for number, (name, shard) in enumerate(shards.items()):
        values = part(full_tensor(case, name), shard_region(shard))
        shape, dtype = values.shape, values.dtype
        if number % 3 == 1:
            memory = torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
        elif number % 3 == 2:
            memory = torch.empty((*shape[:-1], 2 * shape[-1] + 3), dtype=dtype)[..., 1 : 1 + shape[-1]]
        else:
            memory = torch.empty(shape, dtype=dtype)
        memory.copy_(values)
        sources[name] = TrainTensor(shard_region(shard), shard.parameter.shape, memory, 0, name, memory)
    return sources


def rollout_memory(case: Case, rank: int) -> tuple[dict[str, tuple[RolloutTensor, ...]], dict[str, torch.Tensor]]:
    """Make rollout memory with gate and up joined, experts stacked, down projections transposed.

    Returns {HF name: places} and the live parameters.
    """
    model = replace(case.model, torch_dtype=case.rollout_dtype)
    shards = local_parameters(build_inventory(model), case.rollout, rank, case.rollout_library).shards
    places: dict[str, tuple[RolloutTensor, ...]] = {}
    live: dict[str, torch.Tensor] = {}
    experts = sorted({s.parameter.expert for s in shards.values() if s.parameter.expert is not None})
    for name, shard in shards.items():
        kind, expert, parameter = shard.parameter.kind, shard.parameter.expert, name
        joined = kind.endswith(("_gate", "_up"))
        if joined:
            parameter = name.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")
        if expert is not None:
            parameter = parameter.replace(f"experts.{expert}.", "experts.")
        if parameter not in live:
            live[parameter] = _parameter(shard, joined, len(experts))
        memory = live[parameter] if expert is None else live[parameter][experts.index(expert)]
        if kind.endswith("_down"):
            memory = memory.t()
        if joined:
            memory = memory.chunk(2)[kind.endswith("_up")]
        region = shard_region(shard)
        places[name] = (RolloutTensor(region, memory.narrow(region.axis, 0, region.rows), parameter),)
    return places, live


def _parameter(shard: Shard, joined: bool, experts: int) -> torch.Tensor:
    shape = [shard.shape[0] * (2 if joined else 1), *shard.shape[1:]]
    if shard.parameter.kind.endswith("_down"):
        shape.reverse()
    if shard.parameter.expert is not None:
        shape.insert(0, experts)
    return torch.full(shape, -7.0, dtype=getattr(torch, shard.dtype))


class Rank:
    """Hold the training and rollout memory of this process's rank, and its plan."""

    def __init__(self, case: Case):
        self.case, self.rank, self.plan = case, dist.get_rank(), case.plan()
        self.sources = train_memory(case, self.rank)
        self.destinations, self.live = rollout_memory(case, self.rank)

    def build(self) -> Executor:
        """Build the executor of the rank's plan and memory."""
        return build_executor(self.plan, self.rank, self.sources, self.destinations, finish=lambda: None, device="cpu")

    def verifier(self) -> Verifier:
        """Return a verifier that has poisoned the rollout memory."""
        verifier = Verifier(self.plan, self.rank, self.sources, self.destinations, "cpu")
        verifier.poison()
        return verifier

    def differences(self) -> list[str]:
        """Return live parameters that are not bit-equal to slices of the HF tensors (padding must be unchanged)."""
        places, expected = rollout_memory(self.case, self.rank)
        for name in places:
            for place in places[name]:
                place.tensor.copy_(part(full_tensor(self.case, name), place.region))
        return [name for name, tensor in expected.items() if not same_bits(tensor, self.live[name])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements, NaN included."""
    return torch.equal(*(tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (a, b)))


def sync_and_compare(case: Case) -> tuple[SyncReport, int]:
    """Plan, compile, poison, run, verify and compare a rank's part of a sync; return the count of verified elements."""
    rank = Rank(case)
    executor, verifier = rank.build(), rank.verifier()
    report, verified = executor.run(), verifier.check()
    wrong = rank.differences()
    assert not wrong, f"rank {rank.rank}: not bit-exact: {wrong}; {case}"
    assert report.peak_extra_bytes <= 4 * case.bucket_bytes
    return report, verified
