"""The parts of offload_job.py that swap the optimizer."""

from unittest import mock

import torch

from tests.memory.offload_objects import BF16, FP32, refused, same, step, trained, weights
from verl_patches.memory import counters
from verl_patches.memory.host_backed import HostBackedStorage
from verl_patches.memory.swap_optimizer import swap_optimizer


def steps(plain, other):
    """Yields, step by step, whether norms and weights are equal; an error in `other` counts as unequal."""
    for number in range(3):
        norm, norms = step(*plain, number), []
        refused(lambda number=number, norms=norms: norms.append(step(*other, number)))
        yield norms == [norm] and same(weights(plain[0]), weights(other[0]))


def swapped():
    """Three swapped steps against the same unswapped, fp32 and bf16, pieces from few to many."""
    found = {}
    for name, dtype, times in (("fp32 in 3", FP32, 3), ("fp32 in 1", FP32, 1), ("bf16 in 100", BF16, 100)):
        plain, other, equal, summaries = trained(dtype), trained(dtype), [], []
        swaps = swap_optimizer(other[1], times)
        first = counters.take_moves()
        for same_step in steps(plain, other):
            equal.append(same_step)
            summaries.append(counters.offload_of_step([counters.take_moves()]))
        other[1].reload_model_params()
        limit = max(swap.limit_bytes for swap in swaps)
        found[name] = {"equal": equal, "steps": summaries, "limit": limit, "first": first}
    return found


def swap_controls():
    """Optimizers that cannot be swapped, and a step that does not write back a piece's states."""
    found = {
        "plain": refused(lambda: swap_optimizer(trained(distributed=False)[1], 4)),
        "times": refused(lambda: swap_optimizer(trained()[1], 0)),
    }
    chunks, optimizer = trained()
    for one in optimizer.chained_optimizers:
        one.optimizer.__class__ = torch.optim.SGD
    found["sgd"] = refused(lambda: swap_optimizer(optimizer, 4))
    plain, other, offload = trained(), trained(), HostBackedStorage.offload
    swap_optimizer(other[1], 4)
    with mock.patch.object(
        HostBackedStorage, "offload", lambda self, copy: offload(self, copy and "exp_avg_sq" not in self.name)
    ):
        found["equal without exp_avg_sq"] = list(steps(plain, other))
    return found


def counting_by_group():
    """An Adam that counts steps by group and call, as apex's FusedAdam does, swapped and not."""

    class FusedAdam(torch.optim.Optimizer):
        def step(self):
            for group in (group for group in self.param_groups if group["params"]):
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("exp_avg", torch.zeros_like(parameter)).add_(parameter.grad)
                    parameter.data.sub_(state["exp_avg"] * group["lr"] / group["step"])

    plain, other = trained(), trained()
    for one in (*plain[1].chained_optimizers, *other[1].chained_optimizers):
        one.optimizer.__class__ = FusedAdam
    swap_optimizer(other[1], 4)
    equal = list(steps(plain, other))
    counts = [group.get("step") for one in other[1].chained_optimizers for group in one.optimizer.param_groups]
    return {"equal": equal, "counts": counts}
