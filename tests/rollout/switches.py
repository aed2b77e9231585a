"""Rollouts of the 256-die configuration on platform npu_emulated, one for each switch, several in one process.

Each is built by verl's own vLLMRollout (die256.py) and samples the same prompts with the same seeds three times: at
first, after sleep, wake-up and weights written back, and once more, with the prompts in the prefix cache.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any

import verl_patches.prelude_patch  # noqa: F401  before torch, as in a worker
from tests.emulation.emulated_engine import Response, prompts_of, responses_of
from tests.rollout import ascend_engine, die256

LENGTHS, TOKENS, SEED = (5, 17, 1, 140, 64), 5, 7
NAME = "grpo_deepseekv3_256die_true_weight"
REFRESH = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.refresh=true"  # for one process, many engines
)


def sample(llm: Any) -> list[Response]:
    """The response to each prompt, by top-k."""
    from vllm import SamplingParams

    shared = {"temperature": 1.0, "top_k": 50, "max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True}
    params = [SamplingParams(**shared, seed=SEED + number) for number in range(len(LENGTHS))]
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(LENGTHS)]
    return [responses_of(output)[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def answers(made: Any) -> list[Response]:
    """Of the three times."""
    llm = made.inference_engine
    found = sample(llm)
    llm.weights_written(last=False)
    with ascend_engine._weights_written_back(llm):
        llm.sleep(1)
        llm.wake_up()
    llm.weights_written(last=False)
    return found + sample(llm) + sample(llm)


def main(model: str, table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{name: answers of each line of `table`, "read": {name: recipe.rollout.ascend as the engine holds it}}.

    A line: `keys` of recipe.rollout.ascend, `more` overrides, `without`: rows whose originals are in place. The first
    must switch top_k_optimize off: vllm-ascend reads its variable once a process. "balanced routing": the last engine
    once more, with other experts.
    """
    found: dict[str, Any] = {"read": {}}
    for name, line in table.items():
        keys = [f"recipe.rollout.ascend.{key}" for key in line.get("keys", ())]
        overrides = [*keys, *line.get("more", ()), REFRESH]
        made = build(model, overrides, line.get("without", []), first=not found["read"])
        found[name], found["read"][name] = answers(made), die256.options_read(made)
        last = name == list(table)[-1]
        if last:
            os.environ["VLLM_ENABLE_FIX_ROUTE"] = "1"
            found["balanced routing"] = answers(made)
        del made
        gc.collect()
        forget_pool()
    return found


def forget_pool() -> None:
    """What a device's pool does once an engine has ended; the emulated one gives nothing back."""
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    from verl_patches.emulation.npu import memory_pool

    CaMemAllocator.get_instance().pointer_to_data.clear()
    memory_pool._Pool.storages.clear()
    memory_pool._Pool.unmapped.clear()
    memory_pool.empty_cache()


def build(model: str, overrides: list[str], without: list[str], first: bool) -> Any:
    """verl's rollout; after the first one top-k is optimised."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from verl_patches.worker.rollout_engine import weights_move

    rotary_embedding._ROPE_DICT.clear()  # else engines of one process share their rotary tables
    weights_move.value = False  # what an engine without vLLM's sleep mode has left
    if not first:
        from vllm_ascend.patch.worker.patch_common import patch_sampler

        TopKTopPSampler.forward_native = patch_sampler.topk_topp_forward_native
    with ascend_engine.without(without):
        return die256.start(model, NAME, overrides)[1]
