"""Build vLLM's V1 engine with vllm-ascend on platform npu_emulated, generate, and compare log-probs with transformers.

    python -m tests.platform.emulated_engine MODEL JSON    (JSON: arguments of LLM, and `checks` below)

Prints one JSON: {check: {worst: largest |dlogp| against transformers in fp32, teacher-forced, same: whether all greedy
tokens are equal}, ...}. Each check is a function of this file that prepares the engine and says what else it saw.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import verl_patches.prelude_patch  # noqa: F401  before torch, as in a worker

PROMPT_LENGTHS = (5, 17, 3, 140, 64)
TOKENS = 6
LIMITS = {"max_model_len": 512, "max_num_seqs": 8, "gpu_memory_utilization": 0.5, "dtype": "float32", "seed": 0}


def prompts(vocab: int = 512) -> list[list[int]]:
    """Prompts of fixed lengths, random."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def compare(llm: Any, reference: Any) -> dict[str, Any]:
    """Generate greedily, and score what was generated with `reference` (transformers, fp32)."""
    import torch
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    asked = prompts()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
    worst, same = 0.0, True
    for ids, output in zip(asked, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        found = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        with torch.no_grad():
            logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        differences = (torch.tensor(found) - expected).abs()
        worst = max(worst, float(differences.nan_to_num(torch.inf).max()))
        same = same and logits.argmax(-1).tolist() == tokens
    return {"worst": worst, "same": same}


def model_of(llm: Any) -> Any:
    """The engine's model."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def generate(llm: Any) -> dict[str, Any]:
    """Nothing to prepare; names of the classes that ran."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    return {"classes": [type(part).__name__ for part in (worker, worker.model_runner, model_of(llm))]}


def graphs(llm: Any) -> dict[str, Any]:
    """Nodes of the graphs that torchair's backend was given so far."""
    from verl_patches.platform.npu_emulated.packages import Graphs

    return {"traced": Graphs.traced, "stream_switches": Graphs.stream_switches}


def sleep(llm: Any) -> dict[str, Any]:
    """vLLM's sleep of level 1 and wake-up; the share of parameters that are NaN while it sleeps."""
    llm.sleep(1)
    parameters = list(model_of(llm).parameters())
    poisoned = sum(bool(p.isnan().any()) for p in parameters)
    llm.wake_up()
    return {"poisoned": poisoned / len(parameters)}


def spoilt(llm: Any) -> dict[str, Any]:
    """From now on tokens go to the neighbours of their experts."""
    import torch_npu

    right = torch_npu.npu_moe_gating_top_k

    def wrong(*args: Any, **kwargs: Any) -> Any:
        weights, experts, scores = right(*args, **kwargs)
        return weights, (experts + 1) % 256, scores

    torch_npu.npu_moe_gating_top_k = wrong
    return {}


def main(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """The answer."""
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    checks: list[Callable] = [globals()[name] for name in options.pop("checks")]
    eager = {"torch_dtype": "float32", "attn_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(model, **eager).eval()
    llm = LLM(model=model, **{**LIMITS, **options})
    return {check.__name__: {**check(llm), **compare(llm, reference)} for check in checks}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
