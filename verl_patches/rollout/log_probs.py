"""The log-probs of sampled tokens, which verl 54c9b736 asks vLLM for and drops (verl 0.4.0 keeps them)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

PADDING = -1.0  # verl 0.4.0's (verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py)


def keep_sampled(generate_sequences: Callable) -> Callable:
    """Row provider for `vLLMRollout.generate_sequences`: adds `rollout_log_probs` [B, S_response] to its batch.

    fp32, on the device of the responses.
    """

    @functools.wraps(generate_sequences)
    def generate(self: Any, prompts: Any, **kwargs: Any) -> Any:
        import torch

        engine, sampled = self.inference_engine, []
        generate_of_engine = engine.generate

        def listening(*args: Any, **options: Any) -> Any:
            found = generate_of_engine(*args, **options)
            sampled.extend(sample for request in found for sample in request.outputs)
            return found

        engine.generate = listening
        try:
            output = generate_sequences(self, prompts, **kwargs)
        finally:
            del engine.generate
        responses = output.batch["responses"]
        rows = [padded(sample.token_ids, sample.logprobs, responses.shape[1]) for sample in sampled]
        output.batch["rollout_log_probs"] = torch.tensor(rows, dtype=torch.float32, device=responses.device)
        return output

    return generate


def padded(tokens: Sequence[int], log_probs: Sequence[Any], length: int) -> list[float]:
    """One log-prob a token, as vLLM gives them ([{token: Logprob}]), padded on the right to `length`."""
    found = [of_token[token].logprob for token, of_token in zip(tokens, log_probs, strict=True)]
    return found + [PADDING] * (length - len(found))
