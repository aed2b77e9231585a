"""Test responses of the data in a batch, and that verl's update with our advantages has the loss's gradient."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_policy_loss, compute_value_loss

from verl_patches.step.batches.exchange import RaggedTensor, prompt_inputs
from verl_patches.step.objectives import losses
from verl_patches.step.objectives.advantages import (
    LABEL,
    MARKS,
    ROLE,
    FixedData,
    current_fixed_data,
    dataset_responses,
    objective_advantages,
    pair_rows,
)

PAD, WIDTH, PROMPTS, VOCAB, HIDDEN = 2, 6, 6, 11, 7
DESIRABLE = [True, False, True, True, False, False]


def rows(objective, seed=0):
    """Return (prompts as fit() passes them, the dataset's rows)."""
    rng = torch.Generator().manual_seed(seed)

    def ids(least=2):
        count = int(torch.randint(least, WIDTH + 1, (), generator=rng))
        return torch.randint(3, VOCAB, (count,), generator=rng).tolist()

    count = 2 if objective in ("dpo", "ipo", "rm") else 1
    given = [{"responses": [ids() for _ in range(count)]} for _ in range(PROMPTS)]
    for row, label in zip(given, DESIRABLE, strict=True):
        if objective == "kto":
            row["label"] = label
        if objective == "prm":
            row["marks"] = {1: float(label), len(row["responses"][0]) - 1: 0.25} if label else {}
    tensors = prompt_inputs(RaggedTensor(torch.arange(PROMPTS), (1,) * PROMPTS), 3, PAD)
    return DataProto.from_dict(tensors, {"tools_kwargs": np.array(given, dtype=object)}), given


def loss_settings(objective, **more):
    kinds = {"beta": 0.2, "label_smoothing": 0.0, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    return SimpleNamespace(name=objective, **{**kinds, **more})


class Model:
    """Compute log-probs and values of all rows by one linear layer in fp64."""

    def __init__(self, batch, seed=3):
        rng = torch.Generator().manual_seed(seed)
        self.ids, self.mask = batch["responses"], batch["response_mask"].double()
        self.inputs = torch.randn(*self.ids.shape, HIDDEN, dtype=torch.float64, generator=rng)
        self.weight = torch.randn(HIDDEN, VOCAB, dtype=torch.float64, generator=rng).requires_grad_()

    def log_probs(self):
        every = (self.inputs @ self.weight).log_softmax(-1)
        return every.gather(-1, self.ids[..., None])[..., 0] * self.mask

    def values(self):
        return (self.inputs @ self.weight)[..., 0] * self.mask


def objective_batch(objective, order=None):
    """Return (batch with log-probs and values, uids, model), as the trainer has it before compute_advantage."""
    prompts, _ = rows(objective)
    batch = dataset_responses(prompts, objective, WIDTH, PAD)
    batch["response_mask"] = batch["attention_mask"][:, -WIDTH:]
    count = len(batch["responses"])
    uids = np.repeat([f"u{n}" for n in range(PROMPTS)], count // PROMPTS)
    if order is not None:
        batch, uids = {name: tensor[order] for name, tensor in batch.items()}, uids[order]
    model = Model(batch)
    batch["old_log_probs"], batch["values"] = model.log_probs().detach(), model.values().detach()
    batch["ref_log_prob"] = batch["old_log_probs"] - torch.rand(count, WIDTH) / 3
    return batch, uids, model


def direct_loss(settings, batch, uids, model):
    """Return the loss by the pure functions, with the batch's pairs."""
    mask = model.mask
    if settings.name == "prm":
        marked = ~batch[MARKS].isnan()
        return losses.prm(model.values()[marked], batch[MARKS][marked].double())[0]
    first = [row for row, role in enumerate(batch[ROLE]) if role == 0]
    places = {(uid, int(role)): row for row, (uid, role) in enumerate(zip(uids, batch[ROLE], strict=True))}
    second = [places.get((uids[row], 1)) for row in first]
    if settings.name == "rm":
        scores = model.values()[torch.arange(len(mask)), mask.sum(-1).long() - 1]
        return losses.bradley_terry(scores[first], scores[second])[0]
    policy = model.log_probs().sum(-1)
    if settings.name == "sft":
        return losses.sft(policy, mask.sum(-1))
    ratios = policy - (batch["ref_log_prob"] * mask).sum(-1)
    if settings.name == "ipo":
        ratios = ratios / mask.sum(-1)
        return losses.ipo(ratios[first], ratios[second], settings.beta)[0]
    if settings.name == "dpo":
        return losses.dpo(ratios[first], ratios[second], settings.beta, settings.label_smoothing)[0]
    return losses.kto(ratios[first], ratios[second], batch[LABEL][first], settings)[0]


def update_gradient(batch, model, micro, has_values=False, mode="seq-mean-token-sum"):
    """Return the gradient as verl's Megatron workers: micro batches by verl's own loss, averaged."""
    parts = torch.arange(len(batch["responses"])).split(micro)
    gradient = torch.zeros_like(model.weight)
    for part in parts:
        mask = batch["response_mask"][part]
        if has_values:
            sides = model.values()[part], batch["returns"][part].double(), batch["values"][part]
            loss, _ = compute_value_loss(*sides, mask, 1e9, mode)
        else:
            new, advantages = model.log_probs()[part], batch["advantages"][part].double()
            loss, *_ = compute_policy_loss(new.detach(), new, advantages, mask, 0.2, loss_agg_mode=mode)
        gradient += torch.autograd.grad(loss / len(parts), model.weight)[0]
    return gradient


@pytest.mark.parametrize("micro", [1, 3, 6])
@pytest.mark.parametrize("objective", ["sft", "dpo", "cdpo", "ipo", "kto", "rm", "prm"])
def test_the_update_has_the_gradient_of_the_loss(objective, micro):
    settings = loss_settings("dpo", label_smoothing=0.1) if objective == "cdpo" else loss_settings(objective)
    has_values = objective in ("rm", "prm")
    prompts_rows = len(objective_batch(settings.name)[1])
    order = torch.randperm(prompts_rows, generator=torch.Generator().manual_seed(1))
    batch, uids, model = objective_batch(settings.name, order)  # as after balance_batch
    fixed = FixedData(settings)
    fixed.add_advantages(batch, uids)
    loss = direct_loss(settings, batch, uids, model)
    (expected,), loss = torch.autograd.grad(loss, model.weight), loss.detach()
    found = update_gradient(batch, model, micro, has_values)
    assert float((found - expected).norm() / expected.norm()) < 1e-6  # advantages are fp32
    if objective == "sft":
        assert fixed.step_metrics({"actor/log_prob_mean": -2.5}) == {"objective/loss": 2.5}
    else:
        assert fixed.step_metrics({})["objective/loss"] == pytest.approx(float(loss), rel=1e-12)
    control = update_gradient(batch, model, micro, has_values, "token-mean")  # another mode has another gradient
    assert float((control - expected).norm() / expected.norm()) > 1e-2


def test_only_marked_tokens_have_a_gradient():
    batch, uids, _ = objective_batch("prm")
    FixedData(loss_settings("prm")).add_advantages(batch, uids)
    moved = batch["returns"] != batch["values"].float()
    assert moved.equal(~batch[MARKS].isnan()) and 0 < int(moved.sum()) < int(batch["response_mask"].sum())


def test_a_pair_is_found_by_its_prompt_and_roles():
    uids, roles = np.array(["b", "a", "a", "b"]), torch.tensor([1, 0, 1, 0])
    assert pair_rows(uids, roles) == ([1, 3], [2, 0])
    with pytest.raises(KeyError):
        pair_rows(uids, torch.tensor([1, 0, 0, 0]))  # control: no rejected response of a


@pytest.mark.parametrize("objective", ["dpo", "kto", "prm"])
def test_responses_stand_in_the_batch_as_vllm_gives_them(objective):
    prompts, given = rows(objective)
    found = dataset_responses(prompts, objective, WIDTH, PAD)
    n = len(found["responses"]) // PROMPTS
    masks = found["attention_mask"][:, -WIDTH:]
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(found["responses"], masks, strict=True)]
    own = [row["responses"] for row in given]
    if objective == "kto":
        assert texts == [ids for at in range(PROMPTS) for ids in (*own[at], *own[at - 1])]
        assert found[LABEL].tolist() == [label for label in DESIRABLE for _ in range(n)]
    else:
        assert texts == [ids for row in own for ids in row]
    assert found[ROLE].tolist() == list(range(n)) * PROMPTS
    assert found["prompts"][:, -1].tolist() == [place for place in range(PROMPTS) for _ in range(n)]
    if objective == "prm":
        places = [dict(enumerate(row.tolist())) for row in found[MARKS]]
        assert [{at: y for at, y in row.items() if y == y} for row in places] == [row["marks"] for row in given]


def test_the_row_takes_verls_place_only_on_fixed_data():
    batch, uids, _ = objective_batch("dpo")
    data = DataProto.from_dict(batch, {"uid": uids})
    compute = objective_advantages(lambda data, gamma: ("verl's", gamma))
    assert compute(data, gamma=1) == ("verl's", 1)
    with current_fixed_data.set(FixedData(loss_settings("dpo"))) as fixed:
        assert compute(data, gamma=1) is data
    assert data.batch["advantages"].shape == data.batch["responses"].shape and fixed.metrics["objective/margin"]
