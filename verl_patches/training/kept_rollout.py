"""What goes into verl's generation from unpadded prompts, and what stays of it on the worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl import DataProto

from verl_patches.comm.batch_plan import held_after_rollout
from verl_patches.comm.ragged import Ragged, from_padded, prompt_inputs
from verl_patches.comm.tensor_cache import TensorCache


def padded_prompts(prompts: DataProto) -> DataProto:
    """Prompts as verl's generation takes them, from prompt_ids (arrays of int32) and their width and pad."""
    meta, ids = prompts.meta_info, prompts.non_tensor_batch["prompt_ids"]
    width, pad = meta.pop("width"), meta.pop("pad")
    ragged = Ragged(torch.from_numpy(np.concatenate(ids)), tuple(map(len, ids)))
    raw = np.empty(len(ids), dtype=object)
    raw[:] = [part.tolist() for part in ids]
    return DataProto.from_dict(tensors=prompt_inputs(ragged, width, pad), non_tensors={"raw_prompt_ids": raw},
                               meta_info=meta)  # fmt: skip


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
