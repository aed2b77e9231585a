"""Log-probs of sampled tokens: one a token, in vLLM's order, padded where a response is shorter."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.rollout.log_probs import PADDING, keep_sampled, padded


def sample(tokens, log_probs):
    # vLLM gives the sampled token and, where it is another one, the best
    return SimpleNamespace(token_ids=tokens, logprobs=[{token: SimpleNamespace(logprob=value), -1: None}
                                                       for token, value in zip(tokens, log_probs, strict=True)])


def test_the_sampled_tokens_own_and_padding():
    assert padded([7, 3], sample([7, 3], [-0.5, -2.0]).logprobs, 4) == [-0.5, -2.0, PADDING, PADDING]


def test_a_missing_one_is_an_error():
    with pytest.raises(ValueError):
        padded([7, 3], sample([7], [-0.5]).logprobs, 4)


class Engine:
    def generate(self, prompts):
        return [SimpleNamespace(outputs=[sample([1, 2], [-1.0, -2.0]), sample([3], [-3.0])])]


def test_row_rollout_keep_log_probs_adds_them_and_leaves_the_engine_as_it_was():
    """Row rollout.keep_log_probs."""
    rollout = SimpleNamespace(inference_engine=Engine())

    def generate_sequences(self, prompts, **kwargs):
        self.inference_engine.generate(prompts)
        return SimpleNamespace(batch={"responses": torch.zeros(2, 3)})

    for _ in range(2):
        found = keep_sampled(generate_sequences)(rollout, ["p"]).batch["rollout_log_probs"]
        assert found.dtype == torch.float32 and found.tolist() == [[-1, -2, PADDING], [-3, PADDING, PADDING]]
    assert "generate" not in vars(rollout.inference_engine)


def test_they_are_where_the_responses_are():
    rollout = SimpleNamespace(inference_engine=Engine())

    def generate_sequences(self, prompts, **kwargs):
        self.inference_engine.generate(prompts)
        return SimpleNamespace(batch={"responses": torch.zeros(2, 3, device="meta")})

    assert keep_sampled(generate_sequences)(rollout, ["p"]).batch["rollout_log_probs"].is_meta


def test_a_rollout_that_fails_leaves_the_engine_as_it_was():
    rollout = SimpleNamespace(inference_engine=Engine())

    def generate_sequences(self, prompts, **kwargs):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        keep_sampled(generate_sequences)(rollout, ["p"])
    assert "generate" not in vars(rollout.inference_engine)
