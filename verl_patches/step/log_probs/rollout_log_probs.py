"""Keep vLLM's log-probs of sampled tokens: of a step's responses, and of sequences sampled for the log-prob check.

verl 54c9b736 receives the responses' log-probs from vLLM and drops them; verl 0.4.0 returns them. If a run samples at
another temperature or truncates the distribution (top-k, top-p), they are not those of the model's distribution. For
the check (step/log_probs/sampled_check.py) vLLM then samples again at temperature 1, in a second call after that of the
responses. That call does not change the responses: its requests have their own seeds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PADDING = -1.0  # as in verl 0.4.0 (verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py)
CHECK_TOKENS = 256  # limit of a checked sequence: wrong weights show in every token, and each one costs a decoding step


@dataclass(frozen=True)
class CheckRequest:
    """Request sequences that each replica samples for the check after a step's responses; seed: of their sampling."""

    sequences: int
    seed: int


@dataclass(frozen=True)
class CheckedSamples:
    """Hold one replica's sequences and vLLM's log-prob of each response token; seconds: of their sampling."""

    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: list[list[float]]
    seconds: float


def keep_rollout_log_probs(generate_sequences: Callable) -> Callable:
    """Wrap `vLLMRollout.generate_sequences`: add `rollout_log_probs` [B, S_response] to its batch.

    They are fp32, on the device of the responses. After `self.check_request` was set (RecipeWorker.begin_rollout) the
    replica samples once more from its first prompts, and stores the result of `sample_for_check` in
    `self.checked_samples`.
    """

    @functools.wraps(generate_sequences)
    def generate(self: Any, prompts: Any, **kwargs: Any) -> Any:
        import torch

        check = self.__dict__.pop("check_request", None)
        check_prompts = _first_prompts(prompts, check.sequences) if check else []  # before verl takes the batch apart
        engine, requests = self.inference_engine, []
        engine_generate = engine.generate

        def record_samples(*args: Any, **options: Any) -> Any:
            finished = engine_generate(*args, **options)
            requests.extend(finished)
            return finished

        engine.generate = record_samples
        try:
            output = generate_sequences(self, prompts, **kwargs)
        finally:
            del engine.generate
        if "rollout_log_probs" not in output.batch.keys():
            responses = output.batch["responses"]
            sampled = (sample for request in requests for sample in request.outputs)
            rows = [padded_log_probs(sample.token_ids, sample.logprobs, responses.shape[1]) for sample in sampled]
            output.batch["rollout_log_probs"] = torch.tensor(rows, dtype=torch.float32, device=responses.device)
        if check:
            tokens = min(CHECK_TOKENS, self.config.response_length)
            self.checked_samples = sample_for_check(engine, check_prompts, tokens, check.seed)
        return output

    return generate


def _first_prompts(prompts: Any, count: int) -> list[list[int]]:
    ids, mask = prompts.batch["input_ids"][:count], prompts.batch["attention_mask"][:count].bool()
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


def sample_for_check(engine: Any, prompts: Sequence[list[int]], tokens: int, seed: int) -> CheckedSamples:
    """Sample one sequence per prompt at temperature 1 with top-k and top-p off.

    The sequences are in the order of `prompts`, each of at most `tokens`. `engine`: vLLM's LLM, awake; all ranks of its
    instance must call this.
    """
    from vllm import SamplingParams

    begin = time.perf_counter()
    settings = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0}
    settings |= {"max_tokens": tokens, "detokenize": False}
    plain = [SamplingParams(**settings, seed=seed + at) for at in range(len(prompts))]
    requests = engine.generate([{"prompt_token_ids": ids} for ids in prompts], plain, use_tqdm=False)
    samples = [request.outputs[0] for request in requests]
    return CheckedSamples(
        prompts=list(prompts),
        responses=[list(sample.token_ids) for sample in samples],
        log_probs=[padded_log_probs(s.token_ids, s.logprobs, len(s.token_ids)) for s in samples],
        seconds=time.perf_counter() - begin,
    )


def padded_log_probs(tokens: Sequence[int], log_probs: Sequence[Any], length: int) -> list[float]:
    """Return one log-prob per token from vLLM's format ([{token: Logprob}]), padded on the right to `length`."""
    values = [candidates[token].logprob for token, candidates in zip(tokens, log_probs, strict=True)]
    return values + [PADDING] * (length - len(values))
