"""Balanced micro batches do not change the gradients of a mini batch: fp64, verl's losses, Megatron's forward_step.

Without row update.sample_weights, which makes gradients equal in all cases (tests/batches/test_mini_batch_loss.py).

One process; replicas are computed one after another and averaged, as Megatron's DDP does (gradient scaling 1 / dp).
"""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_step
from megatron.core.transformer import TransformerConfig
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss, kl_penalty

from verl_patches.batches.batch_plan import arrival, balanced, packed

pytestmark = pytest.mark.slow
SAMPLES, REPLICAS, WIDTH, VOCAB, HIDDEN = 32, 4, 24, 29, 16
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class Model(torch.nn.Module):
    """From a token and the mean of those before it to (log-probs of the next tokens, entropies)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model_type = ModelType.encoder_or_decoder
        self.config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)
        self.words = torch.nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)

    def set_input_tensor(self, tensor):
        """Of Megatron's stages; a first stage has none."""

    def forward(self, ids):
        words = self.words(ids)
        means = words.cumsum(1) / torch.arange(1, ids.shape[1] + 1, dtype=words.dtype)[:, None]
        logits = self.head(torch.tanh(words + means))[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None])[..., 0], -(logits.exp() * logits).sum(-1)


def batch():
    """({name: [B, S]}, lengths) of an update with responses of unequal lengths."""
    torch.manual_seed(1)
    ids, lengths = torch.randint(VOCAB, (SAMPLES, WIDTH + 1)), torch.randint(1, WIDTH, (SAMPLES,))
    old, ref = (-3 + torch.randn((SAMPLES, WIDTH), dtype=torch.float64) for _ in range(2))
    advantages = torch.randn((SAMPLES, 1), dtype=torch.float64).expand(SAMPLES, WIDTH)
    mask = (torch.arange(WIDTH) < lengths[:, None]).double()
    return {"ids": ids, "mask": mask, "old": old, "ref": ref, "advantages": advantages}, lengths.tolist()


def loss_of(output, data, mode):
    """As MegatronPPOActor.forward_backward_batch's loss_func: clipped policy loss, entropy and KL."""
    log_probs, entropy = output
    clip = dict.fromkeys(("cliprange", "cliprange_low", "cliprange_high"), 0.2)
    inputs = data["old"], log_probs, data["advantages"], data["mask"]
    policy = compute_policy_loss(*inputs, **clip, loss_agg_mode=mode)[0]
    kl = agg_loss(kl_penalty(log_probs, data["ref"], "low_var_kl"), data["mask"], mode)
    return policy - 0.01 * agg_loss(entropy, data["mask"], mode) + 0.1 * kl, {}


def gradients(replicas, data, mode):
    """All gradients of a mini batch in one vector."""
    model = Model()
    for micro_batches in replicas:
        for samples in micro_batches:
            part = {key: value[list(samples)] for key, value in data.items()}

            def step(_, model, part=part):
                return model(part["ids"]), lambda output: loss_of(output, part, mode)

            loss, _ = forward_step(step, None, model, len(micro_batches), None, [], model.config)
            (loss / len(replicas)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def differences():
    """{mode and micro batch size: {micro batches: largest difference to arrival order / largest gradient}}."""
    parallel_state.initialize_model_parallel()
    data, lengths = batch()
    each = SAMPLES // REPLICAS
    share = [range(r * each, (r + 1) * each) for r in range(REPLICAS)]
    found = {}
    for mode in MODES:
        for size in (1, 4):
            ways = {"balanced": balanced(share, lengths, size), "packed": packed(share, lengths, 2 * WIDTH)}
            base = gradients(arrival(share, size), data, mode)
            difference = {way: gradients(batches, data, mode) - base for way, batches in ways.items()}
            largest = base.abs().max()
            found[f"{mode} {size}"] = {way: (d.abs().max() / largest).item() for way, d in difference.items()}
    return found


@pytest.fixture(scope="module")
def found(run_ranks):
    """See `differences`, which starts Megatron's groups in a process of its own."""
    return run_ranks("tests.batches.test_gradients:differences")[0]


def test_gradients_of_the_plan_are_those_of_arrival_order(found):
    planned = {case: ways["balanced"] for case, ways in found.items() if case != "token-mean 4"}
    assert len(planned) == 7 and max(planned.values()) < 1e-13, planned


def test_token_mean_needs_the_row(found):
    """Negative control; with a token budget the weights of verl's own loss always depend on the packing."""
    assert found["token-mean 4"]["balanced"] > 1e-3
    assert all(ways["packed"] > 1e-3 for ways in found.values())
