"""verl's offload of models in Megatron's real DDP, under the rows of VERL_PATCHES; prints what was seen as JSON.

One gloo rank, no MindSpeed: two chunks, of which the first has routed experts, and a model without DDP.
"""

from verl_patches import prelude_patch  # noqa: F401

# isort: split
import json

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from verl.utils import megatron_utils as verl

from verl_patches.memory import phase_clock
from verl_patches.patching import engine


def chunk(experts: bool) -> DistributedDataParallel:
    """A chunk with one dense and, if asked, one expert parameter; in 0.8.0 `allreduce` is what tells them apart."""
    module = torch.nn.Module()
    module.dense = torch.nn.Parameter(torch.randn(8, 3))
    if experts:
        module.expert = torch.nn.Parameter(torch.randn(4, 5))
        module.expert.allreduce = False
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), module)


def sizes(chunks) -> dict:
    """Elements in the storages of each kind."""
    return {f"{kind} {what}": sum(getattr(buffer, f"{what}_data").untyped_storage().nbytes() // 4
                                  for each in chunks for buffer in getattr(each, name))
            for kind, name in (("dense", "buffers"), ("expert", "expert_parallel_buffers"))
            for what in ("param", "grad")}


def weights(chunks) -> list:
    return [p.detach().clone() for each in chunks for p in each.parameters() if p.untyped_storage().nbytes()]


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def main() -> dict:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    chunks, reference = [chunk(experts=True), chunk(experts=False)], torch.nn.Linear(2, 2)
    models, lists = [*chunks, reference], [each.buffers for each in chunks]
    before, of_reference = weights(chunks), weights([reference])
    for each in chunks:
        for parameter in each.parameters():
            parameter.main_grad.fill_(1)
    found = {"at first": sizes(chunks)}
    try:
        verl.load_megatron_model_to_gpu(models)  # what was never offloaded
    except AttributeError as error:
        found["load first"] = str(error)
    phase_clock.take()
    verl.offload_megatron_model_to_cpu(models)
    found["offloaded"] = sizes(chunks)
    verl.offload_megatron_model_to_cpu(models)
    found["offloaded twice"] = sizes(chunks)
    verl.load_megatron_model_to_gpu(models, load_grad=False)
    found["loaded without gradients"] = sizes(chunks)
    found["weights are back"] = same(weights(chunks), before)
    verl.offload_megatron_model_to_cpu(models)
    verl.load_megatron_model_to_gpu(models)
    found["loaded"] = sizes(chunks)
    found["weights are back again"] = same(weights(chunks), before)
    found["gradients"] = [p.main_grad.abs().sum().item() for each in chunks for p in each.parameters()]
    found["reference is the same"] = same(weights([reference]), of_reference)
    found["buffers are Megatron's"] = all(each.buffers is kept for each, kept in zip(chunks, lists, strict=True))
    found["phases"] = list(phase_clock.take())
    found["rows"] = {row["id"]: row["state"] for row in engine.current().status() if row["id"].startswith("memory.")}
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(main()))
