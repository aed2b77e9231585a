"""Measure the memory of log-probs and entropy at DeepSeek-V3's vocabulary against verl's own functions. By hand:

    python tests/benchmarks/log_prob.py [--tokens 512] [--upstream DIR]

Prints JSON: a list of figures, each with `value`, `bound` (what it must not exceed; null where it is reported only) and
`peer` (verl's functions on the same logits, in the same run). Exits 1 where a bound is exceeded. One rank with logits
[tokens, 129280]; with --upstream also beside MindSpeed's body of Megatron's cross entropy, which line a3 runs.

Memory is the most that torch's allocator holds above what it held before the call, logits included there; by
torch.profiler, which sees every allocation. `forward`: verl's passes for log-probs. `update`: forward and backward; the
gradient of the logits is in it. verl's log-probs alone of fp32 logits need nothing under Megatron 0.12.2, which
overwrites the logits in forward: no bound there but ours, 2 chunks. Entropy with log-probs in one update of fp32 logits
fails in backward for the same reason; its peer is null.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from report import argument_parser, figure, print_report

VOCABULARY, SHARE = 129280, 8
Functions = tuple[Callable, Callable]  # entropy, log-probs


def start() -> None:
    """Make Megatron's groups of one rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def inputs(tokens: int, dtype: Any) -> tuple[Any, Any]:
    """Return logits [tokens, V], which repeat 16 rows, and labels [tokens]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, VOCABULARY, generator=generator).to(dtype)
    return logits.repeat(-(-tokens // 16), 1)[:tokens], torch.randint(0, VOCABULARY, (tokens,), generator=generator)


def call(functions: Functions, logits: Any, labels: Any, entropy: bool, update: bool) -> dict[str, Any]:
    """Return {entropy, log_probs} as verl's actor (megatron_actor.py, logits_processor); an update makes gradients."""
    import torch

    found = {}
    with torch.set_grad_enabled(update):
        if entropy:
            found["entropy"] = functions[0](logits)
        found["log_probs"] = functions[1](logits, labels)
        if update:
            torch.stack([value.sum() for value in found.values()]).sum().backward()
    return {name: value.detach() for name, value in found.items()}


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the most bytes that `work` holds at once, above those held before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def as_of_a_model(logits: Any) -> Any:
    """Return a copy of `logits` whose graph holds nothing and allocates nothing of that size in backward."""
    import torch

    class OutputLayer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient[:1, 0], None

    return OutputLayer.apply(torch.ones(1, requires_grad=True), logits)


def extra_bytes(functions: Functions, tokens: int, dtype: Any, entropy: bool, update: bool) -> int | None:
    """Return the bytes beyond the logits; None if the backward fails."""
    logits, labels = inputs(tokens, dtype)
    of_model = as_of_a_model(logits) if update else logits
    try:
        return peak_bytes(functools.partial(call, functions, of_model, labels, entropy, update))
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return None


@contextlib.contextmanager
def mindspeed(folder: Path) -> Iterator[None]:
    """Return MindSpeed's body of Megatron's cross entropy, as its adaptor sets it."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    path = folder / "MindSpeed" / "mindspeed" / "core" / "tensor_parallel" / "cross_entropy.py"
    spec = importlib.util.spec_from_file_location("mindspeed_cross_entropy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    body = staticmethod(module.calculate_predicted_logits)
    with mock.patch.object(VocabParallelCrossEntropy, "calculate_predicted_logits", body):
        yield


def memory(tokens: int, line: str, ours: Functions, verls: Functions) -> Iterator[dict[str, Any]]:
    """Return a figure for each pass, dtype and set of results; the bound is 1/8 of verl's where verl makes a tensor."""
    import torch

    from verl_patches.model.log_prob import CHUNK_BYTES

    passes, results = {"forward": False, "update": True}, {"log-probs": False, "entropy and log-probs": True}
    for kind, dtype, result in itertools.product(passes, ("float32", "bfloat16"), results):
        arguments = tokens, getattr(torch, dtype), results[result], passes[kind]
        mine, theirs = extra_bytes(ours, *arguments), extra_bytes(verls, *arguments)
        bound = 2 * CHUNK_BYTES + 64 * tokens
        if theirs is not None and theirs > tokens * VOCABULARY:
            bound = theirs // SHARE
        yield figure(f"{line}, {kind}, {result}, {dtype}", mine, "bytes", bound, {"verl": theirs})


def figures(tokens: int, upstream: str | None) -> Iterator[dict[str, Any]]:
    """Return all figures, within seconds."""
    from verl.utils.megatron import tensor_parallel

    from verl_patches.model import log_prob

    start()
    names = "vocab_parallel_entropy", "vocab_parallel_log_probs_from_logits"
    ours, verls = (tuple(getattr(module, name) for name in names) for module in (log_prob, tensor_parallel))
    yield from memory(tokens, "pypi", ours, verls)
    if upstream is not None:
        with mindspeed(Path(upstream)):
            yield from memory(tokens, "a3", ours, verls)


def main() -> int:
    parser = argument_parser(__doc__, tokens=512)
    parser.add_argument("--upstream", metavar="DIR")
    options = parser.parse_args()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as in verl's workers on a CPU: verl's entropy compiles its product
    return print_report("log_prob", figures(options.tokens, options.upstream), tokens=options.tokens)


if __name__ == "__main__":
    sys.exit(main())
