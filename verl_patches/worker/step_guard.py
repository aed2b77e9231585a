"""Skip optimizer steps whose gradients are NaN or infinite, on all ranks alike, and report their origin.

At both pins Megatron steps with such gradients in fp32 and bf16: only a loss scaler, which fp16 has, checks them, so
one NaN reaches every weight of the model (core_r0.8.0 and 0.12.2, optimizer.py, `prepare_grads`). verl raises a bare
NotImplementedError for a step that a scaler skipped (megatron_actor.py, `update_policy`).

Ranks agree through Megatron's own gradient norm, which is reduced over all of them: it is NaN or infinite on all ranks
or on none. The origin is known only before gradients are summed over data-parallel ranks: the norms of this rank's own
gradients are computed there, and read only if the step is skipped.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from verl_patches.memory.host_backed import single_optimizers

_LAYER = re.compile(r"(.*decoder\.layers\.)(\d+)")


class StepGuard:
    """Guard one Megatron optimizer, or a chain of them, and the DDP `chunks` that it updates.

    It replaces methods of these objects. Since `take_skips`: `skipped`: skipped steps; `norms`: gradient norms of all
    steps; `in_a_row`: the longest series of skipped steps, which may begin before that call.
    `prefix`: begins the reported names of parameters, and distinguishes the models of a process.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any, prefix: str = ""):
        self.skipped = self.in_a_row = self._skips_in_a_row = 0
        self.norms: list[float] = []
        self.fault: dict[str, Any] | None = None
        self._optimizer, self._norms_of_step = optimizer, list[float]()
        names = (named for chunk in chunks for named in parameter_names(chunk).items())
        self._names = {param: prefix + name for param, name in names}  # in the model's order
        self._own_norms: dict[torch.nn.Parameter, torch.Tensor] = {}  # norms of this rank's own gradients
        # Megatron changes correction biases before the step, in finalize_model_grads after the reductions
        biases = (getattr(module, "expert_bias", None) for chunk in chunks for module in chunk.modules())
        # fp32, as Megatron 0.12.2 converts a bias to it in its first forward pass
        self._biases = [(bias, bias.float().clone()) for bias in biases if isinstance(bias, torch.Tensor)]
        for unit in (unit for chunk in chunks for unit in _reduction_units(chunk)):
            unit.start_grad_sync = self._record_own_norms(unit.start_grad_sync, unit.params)
        for one in {id(each): each for each in (optimizer, *single_optimizers(optimizer))}.values():
            for method in ("get_grad_norm", "clip_grad_norm"):
                setattr(one, method, self._record_norm(getattr(one, method)))
        self._megatron_step, self._apply_gradients = optimizer.step, optimizer.step_with_ready_grads
        optimizer.step, optimizer.step_with_ready_grads = self.step, self.step_if_finite

    def step(self) -> tuple[bool, float, Any]:
        """Run Megatron's step; return (True, gradient norm, zeros). The norm is not finite if the step was skipped.

        The first value is always True, as verl ends the run for False.
        """
        self._norms_of_step.clear()
        done, norm, zeros = self._megatron_step()
        if done:
            self._skips_in_a_row = 0
        else:
            self.skipped, self._skips_in_a_row = self.skipped + 1, self._skips_in_a_row + 1
            self.in_a_row = max(self.in_a_row, self._skips_in_a_row)
            self.fault = self._own_fault()
            for bias, before in self._biases:
                bias.copy_(before)
        self._own_norms.clear()
        self.norms.append(math.nan if norm is None else norm)
        return True, self.norms[-1], zeros

    def step_if_finite(self) -> bool:
        """Run Megatron's step_with_ready_grads if the norms are finite; return whether the weights were updated."""
        norms = self._norms_of_step or [self._optimizer.get_grad_norm()]  # without clipping Megatron computes none
        if not all(map(math.isfinite, norms)):
            return False
        return self._apply_gradients()

    def take_skips(self) -> dict[str, Any]:
        """Return {skipped, in_a_row, stage, fault} since the last call; fault describes the last skipped step.

        fault: parameters (number of those whose gradient on this rank is not finite) and nearest (the name of the one
        nearest to the loss, layers counted over the whole model from 0); None if all of this rank's gradients are
        finite.
        """
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        taken = {"skipped": self.skipped, "in_a_row": self.in_a_row, "stage": stage, "fault": self.fault}
        self.skipped, self.in_a_row, self.fault = 0, 0, None
        self.norms.clear()
        return taken

    def _record_norm(self, method: Callable) -> Callable:
        @functools.wraps(method)
        def noting(*args: Any, **kwargs: Any) -> Any:
            norm = method(*args, **kwargs)
            self._norms_of_step.append(float(norm))
            return norm

        return noting

    def _record_own_norms(self, start_grad_sync: Callable, params: Any) -> Callable:
        @functools.wraps(start_grad_sync)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if not self._own_norms:
                for bias, before in self._biases:
                    before.copy_(bias)
            self._own_norms |= {param: param.main_grad.norm() for param in params}
            return start_grad_sync(*args, **kwargs)

        return noting

    def _own_fault(self) -> dict[str, Any] | None:
        bad = {param for param, norm in self._own_norms.items() if not math.isfinite(norm.item())}
        names = [name for param, name in self._names.items() if param in bad]
        return {"parameters": len(names), "nearest": names[-1]} if names else None


def take_all_skips(guards: Sequence[StepGuard]) -> dict[str, Any] | None:
    """Return the combined results of `StepGuard.take_skips` for the models of one process; None without guards.

    fault: from the first model that has one, as it may cause that of the next model.
    """
    if not guards:
        return None
    taken = [guard.take_skips() for guard in guards]
    skipped, in_a_row = sum(each["skipped"] for each in taken), max(each["in_a_row"] for each in taken)
    fault = next((each["fault"] for each in taken if each["fault"]), None)
    return {**taken[0], "skipped": skipped, "in_a_row": in_a_row, "fault": fault}


def parameter_names(chunk: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return {parameter: name without wrappers' prefixes}; layers are counted over the whole model, from 0."""
    layers = {
        name: module.layer_number - 1
        for name, module in chunk.named_modules()
        if _LAYER.fullmatch(name) and hasattr(module, "layer_number")
    }
    found = {}
    for name, param in chunk.named_parameters():
        layer = _LAYER.match(name)
        if layer and layer[0] in layers:
            name = f"{layer[1]}{layers[layer[0]]}{name[layer.end() :]}"
        while name.startswith("module."):
            name = name.removeprefix("module.")
        found[param] = name
    return found


def _reduction_units(chunk: Any) -> Iterator[Any]:
    """Yield the units that Megatron's DDP reduces in one exchange: bucket groups (0.12.2), or buckets (core_r0.8.0)."""
    if hasattr(chunk, "bucket_groups"):
        yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        return
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        yield from buffer.buckets
