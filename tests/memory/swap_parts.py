"""The parts of offload_job.py that swap the optimizer."""

import torch

from tests.memory.offload_objects import BF16, FP32, refused, same, step, trained, weights
from verl_patches.memory import counters


def swapped():
    """Three swapped steps against the same unswapped, fp32 and bf16, pieces from few to many."""
    from verl_patches.memory.swap_optimizer import swap_optimizer

    found = {}
    for name, dtype, times in (
        ("fp32 in 3", FP32, 3),
        ("fp32 in 1", FP32, 1),
        ("bf16 in 4", BF16, 4),
        ("bf16 in 100", BF16, 100),
    ):
        plain, other, equal, every = trained(dtype), trained(dtype), [], []
        swaps = swap_optimizer(other[1], times)
        first = counters.take_moves()
        for number in range(3):
            norm = step(*plain, number)
            equal.append(step(*other, number) == norm and same(weights(plain[0]), weights(other[0])))
            every.append(counters.offload_of_step([counters.take_moves()]))
        other[1].reload_model_params()
        found[name] = {
            "equal": equal,
            "steps": every,
            "limits": [s.limit_bytes for s in swaps],
            "pieces": [len(s.pieces) for s in swaps],
            "first": counters.offload_of_step([first]),
        }
    return found


def swap_controls():
    """What cannot be swapped, and a step that forgets a piece's states."""
    from verl_patches.memory import swap_optimizer as ours
    from verl_patches.memory.host_backed import HostBackedStorage

    found = {
        "plain": refused(lambda: ours.swap_optimizer(trained(distributed=False)[1], 4)),
        "times": refused(lambda: ours.swap_optimizer(trained()[1], 0)),
    }
    chunks, optimizer = trained()
    for one in optimizer.chained_optimizers:
        one.optimizer.__class__ = torch.optim.SGD
    found["sgd"] = refused(lambda: ours.swap_optimizer(optimizer, 4))
    plain, other, leave = trained(), trained(), HostBackedStorage.offload
    ours.swap_optimizer(other[1], 4)
    HostBackedStorage.offload = lambda self, copy: leave(self, copy and "exp_avg_sq" not in self.name)
    equal = []
    for number in range(3):
        step(*plain, number)
        refused(lambda number=number: step(*other, number))
        equal.append(same(weights(plain[0]), weights(other[0])))
    HostBackedStorage.offload = leave
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
    return {
        "equal": equal,
        "counts": [g.get("step") for one in other[1].chained_optimizers for g in one.optimizer.param_groups],
    }
