"""Put fixed responses and the advantages of their loss into verl's fit(), in the controller.

With one mini batch, one epoch and seq-mean-token-sum, verl's update has the gradient of sum(-A dlogp) / B over the B
responses of a batch. With A = -B dL/dlogp of each response, for all its tokens, that is the gradient of L, for any
layout and micro batches. verl's value loss is the mean of (v - returns)^2 over responses, summed over tokens, so
returns = v - B/2 dL/dv.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch

from verl_patches.current import Current
from verl_patches.spec import VALUE_OBJECTIVES
from verl_patches.step.batches.exchange import RaggedTensor, from_padded, model_inputs
from verl_patches.step.log_probs.rollout_correction import MEAN_LOG_PROB
from verl_patches.step.objectives import losses
from verl_patches.step.objectives.settings import RESPONSES_PER_PROMPT

# columns of a batch; role: 0 for a prompt's first response, 1 for the second (rejected, or for the KL); label and marks
# come from the data
ROLE, LABEL, MARKS = "objective_role", "objective_label", "objective_marks"
METRIC_PREFIX = "objective/"  # prefix of metric names


def dataset_responses(prompts: Any, objective: str, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Return tensors like those of vLLM's rollout for `prompts` (DataProto of verl's fit), with responses of the data.

    They are the tensors of exchange.model_inputs [B, ...], with `width` tokens of responses; ROLE [B]; LABEL [B] bool
    (kto); MARKS [B, width] (prm), NaN where nothing is marked. kto: a prompt's second response is that of the previous
    row in the batch, as in TRL.
    """
    tensors, given = prompts.batch, list(prompts.non_tensor_batch["tools_kwargs"])
    responses = [row["responses"] for row in given]
    if objective == "kto":
        responses = [own + other for own, other in zip(responses, responses[-1:] + responses[:-1], strict=True)]
    n = RESPONSES_PER_PROMPT[objective]
    every = list(chain.from_iterable(responses))
    ids = from_padded(tensors["input_ids"], tensors["attention_mask"], left=True)
    ids = ids.take([place for place in range(len(given)) for _ in range(n)])
    ragged = RaggedTensor(torch.tensor(list(chain.from_iterable(every))), tuple(map(len, every)))
    found = model_inputs(ids, ragged, tensors["input_ids"].shape[1], width, pad_id)
    found[ROLE] = torch.arange(n).repeat(len(given))
    if objective == "kto":
        found[LABEL] = torch.tensor([row["label"] for row in given]).repeat_interleave(n)
    if objective == "prm":
        found[MARKS] = torch.full((len(given), width), torch.nan)
        for marks, row in zip(found[MARKS], given, strict=True):
            marks[list(row["marks"])] = torch.tensor(list(row["marks"].values()))
    return found


class FixedData:
    """Compute advantages of recipe.objective (`settings`) for a run on fixed data, and hold its last step's metrics."""

    def __init__(self, settings: Any):
        self.settings, self.metrics = settings, dict[str, float]()

    def add_advantages(self, batch: MutableMapping[str, Any], uids: Any) -> None:
        """Put advantages and returns [B, S_response] into a step's `batch`; uids [B]: equal for a prompt's responses.

        objective_checks (step/objectives/checks.py) ensures that the batch has the columns that the loss needs.
        """
        mask, name = batch["response_mask"].bool(), self.settings.name
        has_values = name in VALUE_OBJECTIVES
        if has_values:
            variable = batch["values"].double().requires_grad_()
            loss, metrics = self._value_loss(variable, batch, mask, uids)
        elif name == "sft":  # linear: the gradient needs no log-probs, and the update reports the loss
            variable = torch.zeros(len(mask), dtype=torch.float64, requires_grad=True)
            loss, metrics = losses.sft(variable, mask.sum(-1)), {}
        else:
            variable = torch.where(mask, batch["old_log_probs"].double(), 0.0).sum(-1).requires_grad_()
            reference = torch.where(mask, batch["ref_log_prob"].double(), 0.0).sum(-1)
            loss, metrics = self._policy_loss(variable - reference, batch, mask, uids)
        loss.backward()
        scaled = -len(mask) * variable.grad
        dtype = torch.float32
        if has_values:
            batch["returns"] = (variable.detach() + scaled / 2).to(dtype)
            batch["advantages"] = torch.zeros_like(batch["returns"])
        else:
            batch["advantages"] = batch["returns"] = (scaled[:, None] * mask).to(dtype)
        self.metrics = {f"{METRIC_PREFIX}{key}": float(value) for key, value in metrics.items()}
        if name != "sft":
            self.metrics[f"{METRIC_PREFIX}loss"] = float(loss.detach())

    def _policy_loss(self, ratios: torch.Tensor, batch: Mapping[str, Any], mask: torch.Tensor, uids: Any) -> Any:
        settings = self.settings
        if settings.name == "ipo":
            ratios = ratios / mask.sum(-1)
        first, second = pair_rows(uids, batch[ROLE])
        if settings.name == "dpo":
            return losses.dpo(ratios[first], ratios[second], settings.beta, settings.label_smoothing)
        if settings.name == "ipo":
            return losses.ipo(ratios[first], ratios[second], settings.beta)
        return losses.kto(ratios[first], ratios[second], batch[LABEL][first], settings)

    def _value_loss(self, values: torch.Tensor, batch: Mapping[str, Any], mask: torch.Tensor, uids: Any) -> Any:
        if self.settings.name == "prm":
            marks = batch[MARKS].double()
            marked = mask & ~marks.isnan()
            return losses.prm(values[marked], marks[marked])
        scores = values.gather(1, mask.sum(-1, keepdim=True) - 1)[:, 0]  # see dataset.py
        first, second = pair_rows(uids, batch[ROLE])
        return losses.bradley_terry(scores[first], scores[second])

    def step_metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return {objective/...: value} of a step from verl's `metrics`; sft's loss comes from the update."""
        if self.settings.name != "sft":
            return self.metrics
        return {f"{METRIC_PREFIX}loss": -float(metrics[MEAN_LOG_PROB])}


current_fixed_data: Current[FixedData | None] = Current(None)  # set during the trainer's run; None if it samples


def pair_rows(uids: Any, roles: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return (rows of first responses, rows of the second of the same prompts), in any order of the batch."""
    rows = {key: row for row, key in enumerate(zip(uids, roles.tolist(), strict=True))}
    first = [row for (_, role), row in rows.items() if role == 0]
    return first, [rows[uids[row], 1] for row in first]


def objective_advantages(compute_advantage: Callable) -> Callable:
    """Wrap verl's compute_advantage: on fixed data compute the advantages of the loss."""

    @functools.wraps(compute_advantage)
    def compute(data: Any, *args: Any, **kwargs: Any) -> Any:
        if current_fixed_data.value is None:
            return compute_advantage(data, *args, **kwargs)
        current_fixed_data.value.add_advantages(data.batch, data.non_tensor_batch["uid"])
        return data

    return compute
