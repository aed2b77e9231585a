"""Keep vLLM's log-probs of sampled tokens: of a step's responses, and of a sequence sampled for the log-prob check.

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
class CheckedSample:
    """Hold one replica's sequence and vLLM's log-prob of each response token; seconds: of its sampling."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    seconds: float


def keep_rollout_log_probs(generate_sequences: Callable) -> Callable:
    """Wrap `vLLMRollout.generate_sequences`: add `rollout_log_probs` [B, S_response] to its batch.

    They are fp32, on the device of the responses. After `self.check_seed` was set (RecipeWorker.begin_rollout) the
    replica samples once more from its first prompt, and stores the result of `sample_for_check` in
    `self.checked_sample`.
    """

    @functools.wraps(generate_sequences)
    def generate(self: Any, prompts: Any, **kwargs: Any) -> Any:
        import torch

        check_seed = self.__dict__.pop("check_seed", None)
        if check_seed is not None:  # before verl takes the batch apart
            ids, mask = prompts.batch["input_ids"][0], prompts.batch["attention_mask"][0].bool()
            first_prompt = ids[mask].tolist()
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
        if check_seed is not None:
            tokens = min(CHECK_TOKENS, self.config.response_length)
            self.checked_sample = sample_for_check(engine, first_prompt, tokens, check_seed)
        return output

    return generate


def sample_for_check(engine: Any, prompt: list[int], tokens: int, seed: int) -> CheckedSample:
    """Sample a sequence of at most `tokens` at temperature 1 with top-k and top-p off.

    `engine`: vLLM's LLM, awake; all ranks of its instance must call this.
    """
    from vllm import SamplingParams

    begin = time.perf_counter()
    settings = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0, "seed": seed}
    plain = SamplingParams(**settings, max_tokens=tokens, detokenize=False)
    (request,) = engine.generate([{"prompt_token_ids": prompt}], [plain], use_tqdm=False)
    (sample,) = request.outputs
    log_probs = padded_log_probs(sample.token_ids, sample.logprobs, len(sample.token_ids))
    return CheckedSample(prompt, list(sample.token_ids), log_probs, time.perf_counter() - begin)


def padded_log_probs(tokens: Sequence[int], log_probs: Sequence[Any], length: int) -> list[float]:
    """Return one log-prob per token from vLLM's format ([{token: Logprob}]), padded on the right to `length`."""
    values = [candidates[token].logprob for token, candidates in zip(tokens, log_probs, strict=True)]
    return values + [PADDING] * (length - len(values))
