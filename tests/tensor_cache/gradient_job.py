"""Gradients of one mini batch under different micro batches, in fp64: verl's losses, Megatron's own forward_step.

One process; replicas are computed one after another and averaged, as Megatron's DDP does (gradient scaling 1 / dp).
"""

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_step
from megatron.core.transformer import TransformerConfig
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss, kl_penalty

from verl_patches.tensor_cache.batch_plan import arrival, balanced, packed, weight_depends_on_company

SAMPLES, REPLICAS, WIDTH, VOCAB, HIDDEN = 32, 4, 24, 29, 16
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class Model(torch.nn.Module):
    """Reads a token and the mean of those before it; its words' log-probs are those of the next token."""

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
    """What an update is given, [B, S] each, with responses of unequal lengths."""
    torch.manual_seed(1)
    ids = torch.randint(VOCAB, (SAMPLES, WIDTH + 1))
    lengths = torch.randint(1, WIDTH, (SAMPLES,))
    shape = (SAMPLES, WIDTH)
    old, ref = (-3 + torch.randn(shape, dtype=torch.float64) for _ in range(2))
    return {
        "ids": ids,
        "mask": (torch.arange(WIDTH) < lengths[:, None]).double(),
        "old": old,
        "ref": ref,
        "advantages": torch.randn((SAMPLES, 1), dtype=torch.float64).expand(shape),
    }, lengths.tolist()


def loss_of(output, data, mode):
    """As MegatronPPOActor.forward_backward_batch's loss_func: clipped policy loss, entropy and KL."""
    log_probs, entropy = output
    policy = compute_policy_loss(
        data["old"],
        log_probs,
        data["advantages"],
        data["mask"],
        cliprange=0.2,
        cliprange_low=0.2,
        cliprange_high=0.2,
        loss_agg_mode=mode,
    )[0]
    kl = agg_loss(kl_penalty(log_probs, data["ref"], "low_var_kl"), data["mask"], mode)
    return policy - 0.01 * agg_loss(entropy, data["mask"], mode) + 0.1 * kl, {}


def gradients(replicas, data, mode):
    """All gradients of a mini batch in one vector."""
    model = Model()
    for micro_batches in replicas:
        for samples in micro_batches:
            part = {key: value[samples] for key, value in data.items()}

            def step(_, model, part=part):
                return model(part["ids"]), lambda output: loss_of(output, part, mode)

            loss, _ = forward_step(step, None, model, len(micro_batches), None, [], model.config)
            (loss / len(replicas)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def differences():
    """{case: largest difference to arrival order / largest gradient}."""
    parallel_state.initialize_model_parallel()
    data, lengths = batch()
    each = SAMPLES // REPLICAS
    share = [range(r * each, (r + 1) * each) for r in range(REPLICAS)]
    found = {}
    for mode in MODES:
        for size in (1, 4):
            base = gradients(arrival(share, size), data, mode)

            def difference(replicas, base=base, mode=mode):
                return ((gradients(replicas, data, mode) - base).abs().max() / base.abs().max()).item()

            whole = weight_depends_on_company(mode, size)
            found[f"{mode} {size}"] = difference(balanced(share, lengths, size, move_whole=whole))
            found[f"{mode} {size} torn"] = difference(balanced(share, lengths, size))
            found[f"{mode} {size} packed"] = difference(packed(share, lengths, 2 * WIDTH))
    return found
