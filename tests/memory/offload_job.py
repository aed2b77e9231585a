"""What several tests of offload look at, in one process under the rows of VERL_PATCHES: Megatron's real DDP and Adam.

`python offload_job.py PART...` prints JSON. One gloo rank, or WORLD_SIZE of them that meet at the file STORE; no
MindSpeed; sizes are chosen so that nothing is a multiple.
"""

from verl_patches import prelude_patch  # noqa: F401

# isort: split
import json
import os
import sys

import megatron.core.optimizer
import torch
from counted import Counted
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from verl.utils import megatron_utils as verl

from verl_patches.memory import moves, phase_clock
from verl_patches.patching import engine
from verl_patches.platform.cpu.torch_cuda import type_on_cuda

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
        num_layers=1, hidden_size=4, num_attention_heads=1, bf16=dtype == BF16, params_dtype=dtype)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, module)


def trained(dtype=FP32, distributed=True):
    """The same two chunks and their optimizer, whenever it is called."""
    torch.manual_seed(1)
    chunks = [chunk(True, dtype, distributed), chunk(False, dtype, distributed)]
    config = OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, bf16=dtype == BF16, params_dtype=dtype,
                             use_distributed_optimizer=distributed, clip_grad=1.0)
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
    return {f"{kind} {what}": sum(getattr(buffer, f"{what}_data").untyped_storage().nbytes()
                                  for each in chunks for buffer in getattr(each, name))
            for kind, name in (("dense", "buffers"), ("expert", "expert_parallel_buffers"))
            for what in ("param", "grad")}


def refused(action):
    """What `action` is refused with, "" if it is not."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def models():
    """verl's functions on two chunks of an actor and on a reference, as verl calls them."""
    torch.manual_seed(0)
    chunks, reference = [chunk(), chunk(experts=False)], torch.nn.Linear(2, 3)
    views, before, of_reference = [p.view(-1) for p in chunks[0].parameters()], weights(chunks), weights([reference])
    phase_clock.take()
    found = {"at first": sizes(chunks)}
    verl.offload_megatron_model_to_cpu([*chunks, reference])
    verl.offload_megatron_model_to_cpu(chunks)
    found["offloaded"] = sizes(chunks)
    found["reference"] = sum(p.untyped_storage().nbytes() for p in reference.parameters())
    found["first moves"] = moves.take()
    verl.load_megatron_model_to_gpu([*chunks, reference], load_grad=False)
    found["for log-probs"] = sizes(chunks)
    found["weights are back"] = same(weights(chunks), before) and same(weights([reference]), of_reference)
    verl.offload_megatron_model_to_cpu([*chunks, reference])
    found["moves for log-probs"] = moves.take()
    verl.load_megatron_model_to_gpu(chunks)
    found["loaded"] = sizes(chunks)
    found["gradients"] = [p.main_grad.abs().sum().item() for each in chunks for p in each.parameters()]
    found["weights are back again"] = same(weights(chunks), before)
    found["views are of the same memory"] = same(views, [p.view(-1) for p in chunks[0].parameters()])
    with torch.no_grad():
        for each in chunks:
            for parameter in each.parameters():
                parameter.add_(1)
                parameter.main_grad.fill_(7)
    verl.offload_megatron_model_to_cpu(chunks)
    verl.load_megatron_model_to_gpu(chunks)
    found["training is kept"] = same(weights(chunks), [weight + 1 for weight in before])
    found["gradients of the next step"] = [p.main_grad.abs().sum().item() for e in chunks for p in e.parameters()]
    found["moves of training"] = moves.take()
    found["phases"] = list(phase_clock.take())
    found["rows"] = {row["id"]: row["state"] for row in engine.current().status() if row["id"].startswith("memory.")}
    return found


def verl_alone():
    """Control: what verl's own offload leaves."""
    chunks = [chunk()]
    verl.offload_megatron_model_to_cpu(chunks)
    return sizes(chunks)


def optimizers():
    """Every kind of optimizer, three steps with everything offloaded between them, against the same without."""
    found = {}
    for name, dtype, distributed in (("fp32", FP32, True), ("bf16", BF16, True), ("plain fp32", FP32, False),
                                     ("plain bf16", BF16, False)):
        plain, offloaded, equal, every = trained(dtype, distributed), trained(dtype, distributed), [], []
        moves.take()
        for number in range(3):
            norm = step(*plain, number)
            verl.load_megatron_model_to_gpu(offloaded[0])
            verl.load_megatron_optimizer(offloaded[1])
            equal.append(step(*offloaded, number) == norm and same(weights(plain[0]), weights(offloaded[0])))
            verl.offload_megatron_model_to_cpu(offloaded[0])
            verl.offload_megatron_optimizer(offloaded[1])
            every.append(moves.offload_of_step([moves.take()]))
        left = sum(s.untyped_storage().nbytes() for one in offloaded[1].chained_optimizers
                   for state in one.optimizer.state.values() for s in state.values() if s.dim())
        found[name] = {"classes": sorted({type(one).__name__ for one in offloaded[1].chained_optimizers}),
                       "equal": equal, "steps": every, "left": left}
    return found


def spoilt():
    """Each way in which an offload can go wrong, and what it is refused with."""
    def away():
        chunks = [chunk()]
        verl.offload_megatron_model_to_cpu(chunks)
        return chunks

    def other_storage():
        chunks = away()
        buffer = chunks[0].expert_parallel_buffers[0]
        buffer.param_data = torch.zeros_like(buffer.param_data, device="cpu")
        verl.load_megatron_model_to_gpu(chunks)

    def other_size():
        chunks = away()
        chunks[0].buffers[0].param_data.untyped_storage().resize_(12)
        verl.load_megatron_model_to_gpu(chunks)

    def emptied():
        chunks = [chunk()]
        chunks[0].buffers[0].grad_data.untyped_storage().resize_(0)
        verl.offload_megatron_model_to_cpu(chunks)

    def written_reference():
        reference = torch.nn.Linear(2, 3)
        verl.offload_megatron_model_to_cpu([reference])
        verl.load_megatron_model_to_gpu([reference], load_grad=False)
        with torch.no_grad():
            reference.bias.add_(1)
        verl.offload_megatron_model_to_cpu([reference])

    def gradient_without_ddp():
        reference = torch.nn.Linear(2, 3)
        reference(torch.ones(2)).sum().backward()
        verl.offload_megatron_model_to_cpu([reference])

    def state_of_other_size():
        chunks, optimizer = trained()
        step(chunks, optimizer, 0)
        verl.offload_megatron_optimizer(optimizer)
        states = optimizer.chained_optimizers[0].optimizer.state
        next(iter(states.values()))["exp_avg_sq"].untyped_storage().resize_(4)
        verl.load_megatron_optimizer(optimizer)

    cases = (other_storage, other_size, emptied, written_reference, gradient_without_ddp, state_of_other_size)
    return {case.__name__: refused(case) for case in cases}


def counted():
    """Our own account of a step against a count from outside, and a control that copies gradients too."""
    found = {}
    for name in ("as it is", "gradients copied"):
        chunks, optimizer = trained()
        step(chunks, optimizer, 0)
        every = []
        for number in (1, 2, 3):
            moves.take()
            with Counted() as seen:
                if name == "gradients copied":
                    kept = [buffer.grad_data.cpu() for each in chunks for buffer in each.buffers]
                    del kept
                verl.offload_megatron_model_to_cpu(chunks)
                verl.offload_megatron_optimizer(optimizer)
                verl.load_megatron_model_to_gpu(chunks)
                verl.load_megatron_optimizer(optimizer)
            step(chunks, optimizer, number)
            mine = moves.take()
            every.append({"seen": seen.copied_bytes, "told": sum(m["copied_bytes"] for m in mine),
                          "seen host": seen.host_bytes, "told host": sum(m["host_bytes"] for m in mine),
                          "plan": sum(m["bytes"] for m in mine if m["verb"] in moves.COPYING)})
        found[name] = every
    return found


def checkpoints():
    """save_checkpoint and load_checkpoint of verl's worker find the states, which are away before and after."""
    from types import SimpleNamespace

    from verl_patches.memory.checkpoints import at_load, at_save

    chunks, optimizer = trained(BF16)
    step(chunks, optimizer, 0)
    states = [state for one in optimizer.chained_optimizers for state in one.optimizer.state.values()]
    before = [state["exp_avg"].clone() for state in states]
    verl.offload_megatron_optimizer(optimizer)
    worker = SimpleNamespace(_is_actor=True, actor_optimizer=optimizer, actor_module=chunks)

    def held():
        return sum(state["exp_avg"].untyped_storage().nbytes() for state in states)

    found = {"away": held()}
    found["saved"] = at_save(lambda self: same([state["exp_avg"] for state in states], before))(worker)
    found["away again"] = held()

    def replace(self):
        for state in states:
            state["exp_avg"] = state["exp_avg"] * 2

    moves.take()
    at_load(replace)(worker)
    found["host memory for the loaded ones"] = sum(m["host_bytes"] for m in moves.take())
    verl.load_megatron_optimizer(optimizer)
    found["loaded"] = same([state["exp_avg"] for state in states], [each * 2 for each in before])
    return found


def checkpoints_in_our_order():
    """With a conductor, verl's own calls do nothing: weights that are away come for a checkpoint, and go again."""
    from types import SimpleNamespace

    from verl_patches.memory import conduct
    from verl_patches.memory.checkpoints import at_load, at_save
    from verl_patches.memory.movers import movers_of
    from verl_patches.memory.phases import OURS

    chunks, optimizer = trained(BF16)
    conductor = conduct.Conductor(OURS, lambda: None)
    worker = SimpleNamespace(_is_actor=True, actor_optimizer=optimizer, actor_module=chunks)
    found, before = {}, weights(chunks)

    def save(self):
        verl.load_megatron_model_to_gpu(self.actor_module)
        found["saved"] = same(weights(chunks), before)
        verl.offload_megatron_model_to_cpu(self.actor_module)

    def load(self):
        verl.load_megatron_model_to_gpu(self.actor_module)
        for parameter in chunks[0].parameters():
            parameter.data.mul_(2)
        verl.offload_megatron_model_to_cpu(self.actor_module)
        verl.offload_megatron_optimizer(self.actor_optimizer)

    verl.offload_megatron_model_to_cpu(chunks)
    verl.offload_megatron_optimizer(optimizer)
    conductor.add(movers_of(chunks, optimizer))
    conduct.keep(conductor)
    try:
        for name, call in (("save", at_save(save)), ("load", at_load(load))):
            moves.take()
            call(worker)
            found[f"{name} moves"] = [f"{m['verb']} {m['tenant']}" for m in moves.take()]
        found["held"] = sizes(chunks)
        conductor.begin("update")
        doubled = len(list(chunks[0].parameters()))
        found["loaded"] = same(weights(chunks), [each * 2 for each in before[:doubled]] + before[doubled:])
        moves.take()
        at_save(lambda self: None)(worker)
        found["save moves while all is there"] = moves.take()
    finally:
        conduct.keep(None)
    return found


def carried_out():
    """An order carried out by movers of real objects: moves of the second step, and what the table predicts."""
    from verl_patches.memory.conduct import Conductor
    from verl_patches.memory.measure import held_bytes, optimizer_tensors
    from verl_patches.memory.movers import movers_of, movers_of_reference
    from verl_patches.memory.phases import OURS, simulate

    chunks, optimizer = trained(BF16)
    reference = torch.nn.Linear(20, 30)
    step(chunks, optimizer, 0)
    buffers = [buffer for each in chunks for buffer in (*each.buffers, *each.expert_parallel_buffers)]
    held = {"actor_params": [b.param_data for b in buffers], "grads": [b.grad_data for b in buffers],
            "optimizer": optimizer_tensors(optimizer), "ref_params": reference.parameters()}
    full = {tenant: held_bytes(list(tensors), "cpu") for tenant, tensors in held.items()}
    movers = {**movers_of(chunks, optimizer), **movers_of_reference([reference])}
    for mover in movers.values():
        getattr(mover, "offload" if hasattr(mover, "offload") else "free")()
    conductor, every = Conductor(OURS, lambda: None), []
    conductor.add(movers)
    for number in (1, 2):
        moves.take()
        for phase in OURS.phases:
            conductor.begin(phase.name)
            if phase.name == "update":
                step(chunks, optimizer, number)
        conductor.end()
        every.append(moves.take())
    moments = simulate(OURS, full).values()
    return {"moves": [f"{m['verb']} {m['tenant']}" for m in every[1]],
            "to_device": [sum(m["copied_bytes"] for m in every[1] if m["verb"] == "load"),
                          sum(m.to_device_bytes for m in moments)],
            "to_host": [sum(m["copied_bytes"] for m in every[1] if m["verb"] == "offload"),
                        sum(m.to_host_bytes for m in moments)]}


def swapped():
    """Three swapped steps against the same unswapped, fp32 and bf16, pieces from few to many."""
    from verl_patches.memory.swap_optimizer import swap_optimizer

    found = {}
    for name, dtype, times in (("fp32 in 3", FP32, 3), ("fp32 in 1", FP32, 1), ("bf16 in 4", BF16, 4),
                               ("bf16 in 100", BF16, 100)):
        plain, other, equal, every = trained(dtype), trained(dtype), [], []
        swaps = swap_optimizer(other[1], times)
        first = moves.take()
        for number in range(3):
            norm = step(*plain, number)
            equal.append(step(*other, number) == norm and same(weights(plain[0]), weights(other[0])))
            every.append(moves.offload_of_step([moves.take()]))
        other[1].reload_model_params()
        found[name] = {"equal": equal, "steps": every, "limits": [s.limit_bytes for s in swaps],
                       "pieces": [len(s.pieces) for s in swaps], "first": moves.offload_of_step([first])}
    return found


def swap_controls():
    """What cannot be swapped, and a step that forgets a piece's states."""
    from verl_patches.memory import swap_optimizer as ours
    from verl_patches.memory.parking import Parked

    found = {
        "plain": refused(lambda: ours.swap_optimizer(trained(distributed=False)[1], 4)),
        "times": refused(lambda: ours.swap_optimizer(trained()[1], 0)),
    }
    chunks, optimizer = trained()
    for one in optimizer.chained_optimizers:
        one.optimizer.__class__ = torch.optim.SGD
    found["sgd"] = refused(lambda: ours.swap_optimizer(optimizer, 4))
    plain, other, leave = trained(), trained(), Parked.leave
    ours.swap_optimizer(other[1], 4)
    Parked.leave = lambda self, copy: leave(self, copy and "exp_avg_sq" not in self.name)
    equal = []
    for number in range(3):
        step(*plain, number)
        refused(lambda number=number: step(*other, number))
        equal.append(same(weights(plain[0]), weights(other[0])))
    Parked.leave = leave
    found["forgotten state is equal"] = equal
    return found


def counting_by_group():
    """An Adam that counts steps by group and call, as apex's FusedAdam does, swapped and not."""
    from verl_patches.memory.swap_optimizer import swap_optimizer

    class FusedAdam(torch.optim.Optimizer):
        def step(self):
            for group in self.param_groups:
                if not group["params"]:
                    continue
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("exp_avg", torch.zeros_like(parameter)).add_(parameter.grad)
                    parameter.data.sub_(state["exp_avg"] * group["lr"] / group["step"])

    def made():
        chunks, optimizer = trained()
        for one in optimizer.chained_optimizers:
            one.optimizer.__class__ = FusedAdam
        return chunks, optimizer

    plain, other, equal = made(), made(), []
    swap_optimizer(other[1], 4)
    for number in range(3):
        step(*plain, number)
        step(*other, number)
        equal.append(same(weights(plain[0]), weights(other[0])))
    return {"equal": equal, "counts": [g.get("step") for one in other[1].chained_optimizers
                                       for g in one.optimizer.param_groups]}


def main(parts):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = torch.distributed.FileStore(os.environ["STORE"], ranks) if ranks > 1 else torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()
    return {part: globals()[part]() for part in parts}


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1:])))
