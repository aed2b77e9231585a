"""Test log-probs of sampled tokens: one a token, in vLLM's order, padded where a response is shorter."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.step.log_probs.rollout_log_probs import CHECK_TOKENS, PADDING, keep_rollout_log_probs

NO_PROMPTS = SimpleNamespace()


def sample(tokens, log_probs):
    """Return vLLM's output of one sequence, with the sampled token and, if it differs, the best one."""
    pairs = zip(tokens, log_probs, strict=True)
    steps = [{token: SimpleNamespace(logprob=value), -1: None} for token, value in pairs]
    return SimpleNamespace(token_ids=tokens, logprobs=steps)


class Engine:
    def generate(self, prompts):
        return [SimpleNamespace(outputs=[sample([1, 2], [-1.0, -2.0]), sample([3], [-3.0])])]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_row_rollout_keep_log_probs_adds_them_and_leaves_the_engine_as_it_was(device):
    """Test row rollout.keep_log_probs."""
    rollout = SimpleNamespace(inference_engine=Engine())

    def generate_sequences(self, prompts, **kwargs):
        self.inference_engine.generate(prompts)
        return SimpleNamespace(batch={"responses": torch.zeros(2, 3, device=device)})

    for _ in range(2):
        log_probs = keep_rollout_log_probs(generate_sequences)(rollout, NO_PROMPTS).batch["rollout_log_probs"]
        assert log_probs.dtype == torch.float32 and log_probs.device.type == device
        assert log_probs.is_meta or log_probs.tolist() == [[-1, -2, PADDING], [-3, PADDING, PADDING]]
    with pytest.raises(ZeroDivisionError):
        keep_rollout_log_probs(lambda self, prompts: 1 / 0)(rollout, NO_PROMPTS)
    assert "generate" not in vars(rollout.inference_engine)


class SamplingEngine:
    """Stand in for an engine whose n-th sequence is [n] with log-prob -n, and which records its requests."""

    def __init__(self):
        self.requests = []

    def generate(self, prompts, sampling_params, use_tqdm):
        self.requests.append((prompts, sampling_params))
        return [SimpleNamespace(outputs=[sample([at], [-float(at)])]) for at in range(len(prompts))]


@pytest.mark.parametrize("kept_by_verl", [False, True])
def test_a_sequence_to_compare_is_sampled_behind_the_responses_as_the_model_gives_them(kept_by_verl):
    """Check the order here; tests/loop/test_truth_control.py has whole runs."""
    engine = SamplingEngine()
    rollout = SimpleNamespace(inference_engine=engine, config=SimpleNamespace(response_length=3072))
    rollout.check_seed = 11
    ids, mask = torch.tensor([[0, 7, 8], [4, 5, 6], [0, 0, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    batch = {"input_ids": ids, "attention_mask": mask}
    prompts = SimpleNamespace(batch=batch)

    def generate_sequences(self, prompts):
        prompts.batch.clear()  # verl may change the batch
        self.inference_engine.generate(["p"] * 3, "the run's own", use_tqdm=False)
        kept = {"rollout_log_probs": torch.ones(3, 2)} if kept_by_verl else {}
        return SimpleNamespace(batch={"responses": torch.zeros(3, 2), **kept})

    found = keep_rollout_log_probs(generate_sequences)(rollout, prompts).batch["rollout_log_probs"]
    assert found.tolist() == ([[1, 1]] * 3 if kept_by_verl else [[0, PADDING], [-1, PADDING], [-2, PADDING]])
    (_, own), (asked, plain) = engine.requests
    assert own == "the run's own" and asked == [{"prompt_token_ids": [7, 8]}]
    settings = {(p.temperature, p.top_p, p.top_k, p.min_p, p.n, p.max_tokens) for p in plain}
    assert settings == {(1.0, 1.0, -1, 0.0, 1, CHECK_TOKENS)}
    assert [p.seed for p in plain] == [11]
    checked = rollout.checked_sample
    assert checked.seconds >= 0 and not hasattr(rollout, "check_seed")  # the seed is used once
    assert (checked.prompt, checked.response, checked.log_probs) == ([7, 8], [0], [0.0])
