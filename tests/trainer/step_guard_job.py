"""Step Megatron's real DDP and Adam with bad gradients on a rank, guarded and not, for test_step_guard.py."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.memory.offload_objects import BF16, FP32, all_equal, trained, weights
from verl_patches.worker.step_guard import StepGuard

KINDS = {"fp32": (FP32, True), "bf16": (BF16, True), "plain fp32": (FP32, False), "plain bf16": (BF16, False)}


def update(chunks, optimizer, number, bad=None):
    """Make an update with gradients seeded by `number`; `bad`: (rank, parameter of the first chunk, value) to spoil."""
    torch.manual_seed(100 * number + dist.get_rank())
    for one in chunks:
        one.zero_grad_buffer()
    for parameter in (p for one in chunks for p in one.parameters()):
        parameter.main_grad.copy_(torch.randn(parameter.shape))
    if bad is not None and dist.get_rank() == bad[0]:
        dict(chunks[0].module.named_parameters())[bad[1]].main_grad.view(-1)[3] = bad[2]
    optimizer.zero_grad()
    for one in chunks:
        one.finish_grad_sync()
    return optimizer.step()


def found(world, steps, clip_grad=1.0):
    """Return {kind: [for each step: whether weights moved, the guard's report, the norm], and more}."""
    parallel_state.initialize_model_parallel()
    results = {}
    for kind, (dtype, distributed) in KINDS.items():
        guarded, plain = trained(dtype, distributed), trained(dtype, distributed)
        for one in (each for _, optimizer in (guarded, plain) for each in optimizer.chained_optimizers):
            one.config.clip_grad = clip_grad
        guard, seen = StepGuard(*guarded), []
        for number, bad in enumerate(steps):
            before = weights(guarded[0])
            done, norm, _ = update(*guarded, number, bad)
            if bad is None:
                update(*plain, number)
            moved = not all_equal(before, weights(guarded[0]))
            seen.append({"done": done, "norm": float(norm), "moved": moved, **guard.take_skips()})
        equal = all_equal(weights(guarded[0]), weights(plain[0]))
        update(*plain, 99, (world - 1, "dense1", float("nan")))
        spoilt = any(weight.isnan().any().item() for weight in weights(plain[0]))
        for number, bad in enumerate((None, *[(0, "dense1", float("nan"))] * 3, None)):  # mini batches of one step
            update(*guarded, number, bad)
        within = guard.take_skips()
        results[kind] = {"steps": seen, "equal": equal, "spoilt without the guard": spoilt, "within a step": within}
    return results
