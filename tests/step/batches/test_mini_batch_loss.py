"""Test verl's loss of a mini batch against its closed form in fp64, for any micro batches and data-parallel ranks."""

import torch
import torch.distributed as dist
from verl.trainer.ppo.core_algos import agg_loss

from verl_patches.step.batches.micro_batches import (
    MiniBatchCounts,
    Stage,
    count_mini_batch,
    current_stage,
    scale_micro_batch_loss,
)

SAMPLES, WIDTH = 8, 6  # samples of both ranks; each rank has one half
# how each rank's half is cut; the last has another number of micro batches on each rank
CUTS = {"1": ((1, 1, 1, 1),) * 2, "2": ((2, 2),) * 2, "4": ((4,),) * 2, "3+1": ((3, 1), (4,))}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def batch():
    """Return (loss of each token, mask), both [B, S]; ranks differ in their number of tokens."""
    torch.manual_seed(0)
    lengths = torch.tensor([6, 1, 2, 5, 1, 1, 3, 2])
    return torch.randn(SAMPLES, WIDTH, dtype=torch.float64), torch.arange(WIDTH) < lengths[:, None]


def expected(mode):
    """Return (loss, gradient to each token's loss) of the batch by autograd; sequence modes average over samples."""
    losses, mask = batch()
    losses.requires_grad_()
    if mode == "token-mean":
        loss = (losses * mask).sum() / mask.sum()
    else:
        loss = torch.stack(
            [agg_loss(row, kept, mode) for row, kept in zip(losses.split(1), mask.split(1), strict=True)]
        ).mean()
    return loss.detach(), *torch.autograd.grad(loss, losses)


def micro_batch_losses(micro_batches, aggregate, mode):
    """Return the loss that Megatron makes of a rank's micro batches."""
    losses = [aggregate(m["losses"], m["attention_mask"][:, -WIDTH:], mode) for m in micro_batches]
    return losses, sum(losses) / len(losses)


def measured():
    """Return {(mode, cut, ours): (reported loss, gradient)} of the mean over two data-parallel ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    half, found = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4), {}
    for mode in MODES:
        for cut, sizes in CUTS.items():
            for ours in (True, False):
                losses, mask = batch()
                losses.requires_grad_()
                whole = {
                    "losses": losses[half],
                    "responses": mask[half],
                    "attention_mask": torch.cat([mask, mask], 1)[half],
                }
                parts = {name: value.split(sizes[dist.get_rank()]) for name, value in whole.items()}
                micro_batches = [
                    TensorParts(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)
                ]
                aggregate = scale_micro_batch_loss(agg_loss)
                counts = MiniBatchCounts() if ours else None
                with current_stage.set(Stage(counts=counts)):
                    assert list(count_mini_batch(batch_iterator)(micro_batches, 1)) == micro_batches
                    each, loss = micro_batch_losses(micro_batches, aggregate, mode)
                loss.backward()
                metrics = {"actor/pg_loss": [[value.item()] for value in each], "actor/grad_norm": [1.0]}
                if ours:
                    counts.report(metrics)
                dist.all_reduce(losses.grad)  # DDP averages
                found[mode, cut, ours] = metrics["actor/pg_loss"], losses.grad / 2
    return found


class TensorParts(dict):
    """Hold a micro batch, whose length is the number of samples, as a TensorDict's."""

    def __len__(self):
        return self["responses"].shape[0]


def batch_iterator(batches, vpp_size):
    """Stand in for verl's make_batch_generator without virtual stages."""
    return iter(batches)


def test_loss_and_gradient_are_those_of_the_whole_mini_batch(run_ranks):
    ranks = run_ranks("tests.step.batches.test_mini_batch_loss:measured", size=2)
    for found in ranks:
        for (mode, cut, ours), (loss, gradient) in found.items():
            exact, by_autograd = expected(mode)
            if ours:
                assert torch.allclose(gradient, by_autograd, rtol=1e-6), (mode, cut)
                assert abs(loss - exact) < 1e-6, (mode, cut)
    control = {(mode, cut): gradient for (mode, cut, ours), (_, gradient) in ranks[0].items() if not ours}
    by_autograd = expected("token-mean")[1]  # negative control: verl's own depends on the micro batches
    assert all((control["token-mean", cut] - by_autograd).abs().max() > 0.01 for cut in CUTS)
    assert (control["token-mean", "1"] - control["token-mean", "4"]).abs().max() > 0.01


def test_outside_an_update_losses_are_verls():
    losses, mask = batch()
    assert all(scale_micro_batch_loss(agg_loss)(losses, mask, mode) == agg_loss(losses, mask, mode) for mode in MODES)
