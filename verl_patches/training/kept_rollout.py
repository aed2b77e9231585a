"""What goes into verl's generation from unpadded prompts, and what stays of it on the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl import DataProto

from verl_patches.comm.batch_plan import held_after_rollout
from verl_patches.comm.ragged import Ragged, from_padded, prompt_inputs
from verl_patches.comm.tensor_cache import TensorCache
from verl_patches.errors import ConfigError


def padded_prompts(told: Mapping[str, Any], rank: int, world: int) -> DataProto:
    """This rank's prompts as verl's generation takes them.

    `told`: prompt_ids (int32, one after the other) and prompt_lengths of all ranks in order, width and pad of the
    padded prompts, and meta. ConfigError where they cannot be shared out equally, on every rank.
    """
    lengths = told["prompt_lengths"]
    each, left = divmod(len(lengths), world)
    if left:
        raise ConfigError(f"tensor cache: {len(lengths)} prompts for {world} workers; expected a multiple of {world}: "
                          "change data.train_batch_size")
    ids = np.split(told["prompt_ids"], np.cumsum(lengths)[:-1])[rank * each : (rank + 1) * each]
    ragged = Ragged(torch.from_numpy(np.concatenate(ids)), tuple(map(len, ids)))
    raw = np.empty(each, dtype=object)
    raw[:] = [part.tolist() for part in ids]
    return DataProto.from_dict(tensors=prompt_inputs(ragged, told["width"], told["pad"]),
                               non_tensors={"raw_prompt_ids": raw}, meta_info=dict(told["meta"]))  # fmt: skip


def keep_rollout(cache: TensorCache, step: int, batch: Any) -> DataProto:
    """What the trainer gets of verl's output `batch`; ids and log-probs stay in `cache`, unpadded, by sample."""
    count, width = batch["responses"].shape
    samples = held_after_rollout(count * dist.get_world_size(), range(dist.get_world_size()))[dist.get_rank()]
    mask = batch["attention_mask"]
    prompts = from_padded(batch["prompts"], mask[:, :-width], left=True, dtype=torch.int32)
    responses = from_padded(batch["responses"], mask[:, -width:], dtype=torch.int32)
    cache.put(step, "prompts", samples, prompts)
    cache.put(step, "responses", samples, responses)
    if "rollout_log_probs" in batch.keys():
        cache.put(step, "rollout_log_probs", samples, from_padded(batch["rollout_log_probs"], mask[:, -width:]))
    ids = np.empty(count, dtype=object)
    on_host = Ragged(responses.values.cpu(), responses.lengths)
    ids[:] = [part.numpy() for part in on_host.parts()]
    lengths = {"prompt_length": prompts.lengths, "response_length": responses.lengths}
    return DataProto.from_dict(tensors={name: torch.tensor(each) for name, each in lengths.items()},
                               non_tensors={"response_ids": ids})  # fmt: skip
