"""Engines of vllm-ascend on platform npu_emulated, several in one process, compared with transformers in fp32.

`main(models, cases)` builds each case's engine and runs its checks in order. A case is
    {"model": name, "options": arguments of LLM, "without": row ids, "checks": {name: {...}, ...}}
with, for each check, all optional:
    "lengths": of the prompts, "tokens": how many are generated, "without": row ids whose original is put in place
    meanwhile, "before": function of this file.
The answer: {check: {worst: largest |dlogp|, same: whether all greedy tokens are equal, ...}, ...}.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import verl_patches.prelude_patch  # noqa: F401  before torch, as in a worker
from tests.emulation.emulated_engine import LIMITS, PROMPT_LENGTHS, TOKENS, compare, model_of, reference_of, refused


@contextlib.contextmanager
def without(rows: list[str]) -> Iterator[None]:
    """Inside, upstream's own objects are in the places of `rows`."""
    from verl_patches.patching import engine

    taken = [engine.current()._rows[name] for name in rows]
    assert [row.state for row in taken] == ["active"] * len(rows)
    for row in taken:
        row.place.restore()
    try:
        yield
    finally:
        for row in taken:
            setattr(row.place.holder, row.place.attribute, row.installed)


def routes(llm: Any, reference: Any) -> dict[str, Any]:
    """In this check `routed` counts [tokens, those routed otherwise than in fp32 on the same activations]."""
    import torch
    import torch_npu

    route, counted, hidden = torch_npu.npu_moe_gating_top_k, [0, 0], {}
    for layer, ours in zip(reference.model.layers, model_of(llm).model.layers, strict=True):
        if hasattr(ours.mlp, "gate"):
            gate = ours.mlp.gate
            gate.register_forward_hook(lambda gate, inputs, _, layer=layer: hidden.update(now=(layer, inputs[0])))

    def count(logits: Any, *args: Any, bias: Any, **kwargs: Any) -> Any:
        layer, inputs = hidden["now"]
        gate = layer.mlp.gate
        exact = torch.nn.functional.linear(inputs.float(), gate.weight)
        expected = route(exact, *args, bias=gate.e_score_correction_bias, **kwargs)[1].sort(-1).values
        found = route(logits, *args, bias=bias, **kwargs)
        counted[0] += len(logits)
        counted[1] += int((found[1].sort(-1).values != expected).any(-1).sum())
        return found

    torch_npu.npu_moe_gating_top_k = count
    return {"routed": counted}


def sampled(llm: Any, reference: Any) -> dict[str, Any]:
    """How many of 512 words top-k 50, top-p 0.9 and both leave, by vllm-ascend's sampler; null where it fails."""
    import torch
    from vllm_ascend.patch.worker.patch_common import patch_sampler

    logits = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    left = []
    for k, p in ((50, None), (None, 0.9), (50, 0.9)):
        k, p = (None if each is None else torch.tensor([each]) for each in (k, p))
        seen: list[Any] = []
        patch_sampler.random_sample, real = (
            (lambda probs, _, seen=seen: seen.append(probs)),
            patch_sampler.random_sample,
        )
        try:
            patch_sampler.topk_topp_forward_native(None, logits.clone(), {}, k, p)
            left.append(int((seen[0] > 0).sum()))
        except RuntimeError:
            left.append(None)
        finally:
            patch_sampler.random_sample = real
    return {"left": left}


def slept(llm: Any, reference: Any) -> dict[str, Any]:
    """Sleep of level 2 by the row memory.sleep_mode, wake up, generate (`error`), and write the weights back."""
    llm.weights_written(last=False)
    with _weights_written_back(llm):
        llm.sleep(2)
        asleep = {"weights": _spoilt(model_of(llm).parameters()), "buffers": _spoilt(model_of(llm).buffers())}
        llm.wake_up()
        error = refused(lambda: llm.generate([{"prompt_token_ids": [3, 4]}], use_tqdm=False))
    llm.weights_written(last=False)
    return {"asleep": asleep, "error": error}


def slept_without_the_row(llm: Any, reference: Any) -> dict[str, Any]:
    """vLLM's own sleep of level 2 and wake-up, then the weights written back."""
    with _weights_written_back(llm):
        llm.sleep_mode._sleep(2)
        llm.sleep_mode._wake_up(None)
    return {"buffers": _spoilt(model_of(llm).buffers())}


@contextlib.contextmanager
def _weights_written_back(llm: Any) -> Iterator[None]:
    """What a weight sync would do at the end of the block: every weight, and no buffer, as it was before."""
    import torch

    from verl_patches.memory.sleep_mode import weights_of

    kept = {name: tensor.detach().clone() for name, tensor in weights_of(model_of(llm)).items()}
    yield
    with torch.no_grad():
        for name, tensor in weights_of(model_of(llm)).items():
            tensor.copy_(kept[name])


def _spoilt(tensors: Any) -> int:
    return sum(bool(tensor.is_floating_point() and tensor.isnan().any()) for tensor in tensors)


def check_of(llm: Any, reference: Any, check: dict[str, Any]) -> dict[str, Any]:
    """One check of a case."""
    import torch_npu

    found, route = {}, torch_npu.npu_moe_gating_top_k
    with without(check.get("without", [])):
        if "before" in check:
            found |= globals()[check["before"]](llm, reference)
        lengths, tokens = check.get("lengths", PROMPT_LENGTHS), check.get("tokens", TOKENS)
        try:
            if tokens:
                found |= compare(llm, reference, lengths, tokens)
        except ValueError as error:  # platform npu_emulated raises it where an operator's arguments are wrong
            found["fault"] = str(error)
    torch_npu.npu_moe_gating_top_k = route  # where `routes` took its place
    return found


def main(models: dict[str, str], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer."""
    import torch
    from vllm import LLM
    from vllm.model_executor.layers import rotary_embedding

    from verl_patches.worker.memory import checked_device

    references = {name: reference_of(path) for name, path in models.items()}
    found = {}
    for case in cases:
        options = {**LIMITS, **case["options"]}
        options["additional_config"] = {"refresh": True, **options.get("additional_config", {})}
        rotary_embedding._ROPE_DICT.clear()  # else engines of one process share their rotary tables
        checked_device.value = torch.npu  # as in verl's worker: each sleep is checked
        with without(case.get("without", [])):
            llm = LLM(model=models[case["model"]], **options)
        for name, check in case["checks"].items():
            found[name] = check_of(llm, references[case["model"]], check)
        del llm
        gc.collect()
    return found
