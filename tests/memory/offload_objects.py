"""Make small real DDP and Adam of Megatron, and count copies; no size is a multiple of an alignment."""

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from verl_patches.emulation.cpu.torch_on_cpu import cuda_type_name
from verl_patches.memory import counters
from verl_patches.memory.measure import optimizer_tensors
from verl_patches.memory.offload import Grads, Optimizer, Params

FP32, BF16 = torch.float32, torch.bfloat16
if megatron.core.optimizer.Adam.__module__.startswith("verl_patches"):  # line a3 without MindSpeed: apex's stand-in
    megatron.core.optimizer.Adam = megatron.core.optimizer.distrib_optimizer.Adam = torch.optim.AdamW
    torch.Tensor.type = cuda_type_name(torch.Tensor.type)


class Counted(torch.overrides.TorchFunctionMode):
    """Count copies between host and device, and new host memory, by the tensor calls that make them."""

    def __init__(self):
        super().__init__()
        self.copied_bytes = self.host_bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if name in ("copy_", "cpu", "to", "clone"):
            self.copied_bytes += args[0].nbytes
        if name in ("empty", "cpu", "to", "clone"):
            self.host_bytes += result.nbytes
        return result


def chunk(experts=True, dtype=FP32, distributed=True):
    """Make a chunk with dense parameters and one of an expert, marked by `allreduce`."""
    module = torch.nn.Module()
    for number in range(5):
        module.register_parameter(f"dense{number}", torch.nn.Parameter(torch.randn(8, 3 + number).to(dtype)))
    if experts:
        module.expert = torch.nn.Parameter(torch.randn(4, 5).to(dtype))
        module.expert.allreduce = False
    return in_ddp(module, dtype, distributed)


def in_ddp(module, dtype, distributed=True):
    """Wrap `module` in DDP as Megatron trains it."""
    shape = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    config = module.config = TransformerConfig(**shape, bf16=dtype == BF16, params_dtype=dtype)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, module)


def trained(dtype=FP32, distributed=True):
    """Make two chunks and their optimizer, equal at every call."""
    torch.manual_seed(1)
    chunks = [chunk(True, dtype, distributed), chunk(False, dtype, distributed)]
    types = {"bf16": dtype == BF16, "params_dtype": dtype, "use_distributed_optimizer": distributed}
    config = OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, clip_grad=1.0, **types)
    return chunks, get_megatron_optimizer(config, chunks)


def step(chunks, optimizer, number):
    """Make an update with gradients seeded by the number and return the gradient norm."""
    torch.manual_seed(100 + number)
    for one in chunks:
        one.zero_grad_buffer()
    for parameter in (p for one in chunks for p in one.parameters()):
        parameter.main_grad.copy_(torch.randn(parameter.shape))
    optimizer.zero_grad()
    return float(optimizer.step()[1])


def load(chunks, optimizer=None):
    """Load all of the actor to the device."""
    Params(chunks).load()
    Grads(chunks).alloc()
    if optimizer is not None:
        Optimizer(optimizer).load()


def offload(chunks, optimizer=None):
    """Offload all of the actor from the device."""
    Grads(chunks).free()
    Params(chunks).offload()
    if optimizer is not None:
        Optimizer(optimizer).offload()


def adam_states(optimizer):
    """Return Adam's states of every parameter."""
    return [state for one in optimizer.chained_optimizers for state in one.optimizer.state.values()]


def state_bytes(optimizer):
    return sum(tensor.untyped_storage().nbytes() for tensor in optimizer_tensors(optimizer))


def weights(chunks):
    return [p.detach().clone() for each in chunks for p in each.parameters()]


def all_equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def sizes(chunks):
    """Return the bytes in the storages of each kind."""
    totals = {}
    for kind in ("buffers", "expert_parallel_buffers"):
        for name in ("param_data", "grad_data"):
            tensors = [getattr(buffer, name) for one in chunks for buffer in getattr(one, kind)]
            totals[f"{kind} {name}"] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return totals


def take_move_names():
    """Return the moves since the last call: ["load actor_params", ...]."""
    return [f"{move['verb']} {move['group']}" for move in counters.take_moves()]


def error_text(action):
    """Return the error of `action`, "" without one."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
