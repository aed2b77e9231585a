"""What offload_job.py moves: Megatron's real DDP and Adam, small; sizes are chosen so that nothing is a multiple."""

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from verl_patches.platform.cpu.torch_on_cpu import type_on_cuda

FP32, BF16 = torch.float32, torch.bfloat16
if megatron.core.optimizer.Adam.__module__.startswith("verl_patches"):  # line a3 without MindSpeed: apex's stand-in
    megatron.core.optimizer.Adam = megatron.core.optimizer.distrib_optimizer.Adam = torch.optim.AdamW
    torch.Tensor.type = type_on_cuda(torch.Tensor.type)


def chunk(experts=True, dtype=FP32, distributed=True):
    """A chunk with dense and, if asked, expert parameters; `allreduce` is what tells them apart."""
    module = torch.nn.Module()
    for number in range(5):
        module.register_parameter(f"dense{number}", torch.nn.Parameter(torch.randn(8, 3 + number).to(dtype)))
    if experts:
        module.expert = torch.nn.Parameter(torch.randn(4, 5).to(dtype))
        module.expert.allreduce = False
    return in_ddp(module, dtype, distributed)


def in_ddp(module, dtype, distributed=True):
    """`module` as Megatron trains it."""
    config = module.config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, bf16=dtype == BF16, params_dtype=dtype
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, module)


def trained(dtype=FP32, distributed=True):
    """The same two chunks and their optimizer, whenever it is called."""
    torch.manual_seed(1)
    chunks = [chunk(True, dtype, distributed), chunk(False, dtype, distributed)]
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        bf16=dtype == BF16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        clip_grad=1.0,
    )
    return chunks, get_megatron_optimizer(config, chunks)


def step(chunks, optimizer, number):
    """One update with gradients of that number; its gradient norm."""
    torch.manual_seed(100 + number)
    for each in chunks:
        each.zero_grad_buffer()
        for parameter in each.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape))
    optimizer.zero_grad()
    return float(optimizer.step()[1])


def weights(chunks):
    return [p.detach().clone() for each in chunks for p in each.parameters()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def sizes(chunks):
    """Bytes in the storages of each kind."""
    return {
        f"{kind} {what}": sum(
            getattr(buffer, f"{what}_data").untyped_storage().nbytes()
            for each in chunks
            for buffer in getattr(each, name)
        )
        for kind, name in (("dense", "buffers"), ("expert", "expert_parallel_buffers"))
        for what in ("param", "grad")
    }


def refused(action):
    """What `action` is refused with, "" if it is not."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
