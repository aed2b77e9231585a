"""A step of the 256-die run as verl's fit() has it for its workers, with invented tokens; for dispatch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from tests.tensor_cache.lengths import PROMPT, RESPONSE, lognormal_lengths
from verl_patches.tensor_cache.exchange import Ragged, model_inputs

PROMPTS, EACH, WORLD, VOCABULARY = 512, 16, 256, 129_280
SAMPLES = PROMPTS * EACH


def lengths() -> tuple[list[int], list[int]]:
    """Tokens of every prompt (by sample) and response."""
    both = lognormal_lengths(SAMPLES, 0.55, seed=1)
    prompts = [min(min(both[at : at + EACH]) - 1, 200) for at in range(0, SAMPLES, EACH) for _ in range(EACH)]
    return prompts, [min(total - prompt, RESPONSE) for total, prompt in zip(both, prompts, strict=True)]


def prompts_of(count: int, of_sample: list[int]) -> DataProto:
    """What fit() gives to generate_sequences."""
    asked = Ragged(
        torch.randint(VOCABULARY, (sum(of_sample[: count * EACH : EACH]),)), tuple(of_sample[: count * EACH : EACH])
    )
    tensors = model_inputs(asked, Ragged(torch.zeros(0), (0,) * count), PROMPT, 0, 0)
    raw = np.empty(count, dtype=object)
    raw[:] = [part.tolist() for part in asked.parts()]
    names = "input_ids", "attention_mask", "position_ids"
    return DataProto.from_dict({name: tensors[name] for name in names}, {"raw_prompt_ids": raw})


class Step:
    """verl's fit() as far as workers see it: which tensors its batch has at which call."""

    def __init__(self, group: Any, call: Callable[[str, DataProto], Any]):
        self.group, self.call = group, call

    def generate(self, prompts: DataProto) -> DataProto:
        """The batch with what fit() adds."""
        batch = self.group.generate_sequences(prompts)
        batch.non_tensor_batch.update(columns(len(batch)))
        batch.batch["response_mask"] = batch.batch["attention_mask"][:, -RESPONSE:].clone()
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return batch

    def train(self, batch: DataProto) -> None:
        """The other three calls."""
        shape = batch.batch["responses"].shape
        self.call("compute_log_prob", batch)
        batch.batch["old_log_probs"] = torch.zeros(shape)
        self.call("compute_ref_log_prob", batch)
        scores = batch.batch["response_mask"] * torch.arange(float(len(batch)))[:, None]
        for name in ("ref_log_prob", "token_level_scores", "token_level_rewards", "advantages", "returns"):
            batch.batch[name] = scores.clone()
        batch.meta_info["temperature"] = 0.9
        self.call("update_actor", batch)


def columns(count: int) -> dict[str, np.ndarray]:
    """What comes from the data set, by sample."""
    found = {
        "uid": ["8d1cd5f4-0000-4f6e-a1a4-5a39d8f0a2a6"] * count,
        "data_source": ["deepscaler"] * count,
        "ability": ["math"] * count,
        "reward_model": [{"style": "rule", "ground_truth": "42"}] * count,
        "extra_info": [{"split": "train", "index": 7}] * count,
        "index": list(range(count)),
    }
    return {name: np.array(values, dtype=object) for name, values in found.items()}


def balanced(batch: DataProto) -> DataProto:
    """As trainer.balance_batch."""
    tokens = batch.batch["attention_mask"].sum(-1).tolist()
    parts = get_seqlen_balanced_partitions(tokens, k_partitions=WORLD, equal_size=True)
    batch.reorder(torch.tensor([sample for part in parts for sample in part]))
    return batch
