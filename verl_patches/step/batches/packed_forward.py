"""Run the forward pass of line a3's DeepSeek-V3: packed by verl, and with context parallelism in contiguous parts.

Ulysses (MindSpeed's UlyssesContextAttention) exchanges parts of tokens for parts of heads around attention, which
then has all T tokens in the order of ranks. verl's own parts (two chunks of each sequence,
verl.models.mcore.util.preprocess_packed_seqs) are made for Transformer Engine's ring attention; that exchange would
return them in another order.

Each CP rank has the whole loss, and the gradient of its own part. Megatron averages gradients over DP x CP ranks
(DDP's group), so `_GatherParts` multiplies by CP; verl.models.mcore.util.postprocess_packed_seqs does not, so every
gradient would be divided by CP.

Shape letters: B samples, S width of verl's batch, T packed tokens with padding, T/cp of them on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def forward_registry() -> dict[Any, Callable]:
    """Return the entry for verl's MODEL_FORWARD_REGISTRY."""
    from verl.models.mcore.registry import SupportedModel

    return {SupportedModel.DEEPSEEK_V3: forward}


def forward(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    sequence_parallel: bool,
    value_model: bool = False,
    pack_seqs: bool = True,
    logits_processor: Callable | None = None,
    logits_processor_args: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Return verl's gptmodel_forward output: logits or `logits_processor`'s tensors as [B, S, ...], 0 in padding.

    A value model returns its values [B, S]. All but the last pipeline stage return hidden states.
    """
    from megatron.core import parallel_state
    from verl.models.mcore.model_forward import gptmodel_forward
    from verl.utils.megatron_utils import unwrap_model

    if parallel_state.get_context_parallel_world_size() == 1:
        batch = model, input_ids, attention_mask, position_ids, sequence_parallel, value_model, pack_seqs
        return gptmodel_forward(*batch, logits_processor, logits_processor_args or {})
    parts = SequenceParts(attention_mask)
    ids, params = parts.local_part(input_ids), parts.packed_seq_params()
    output = model(input_ids=ids, attention_mask=None, position_ids=position_ids, packed_seq_params=params)
    if not unwrap_model(model).post_process:
        return output
    if logits_processor is None:
        values = parts.full_tensor(output)
        return values[..., 0] if value_model else values
    arguments = {name: parts.local_part(tensor) for name, tensor in (logits_processor_args or {}).items()}
    return {name: parts.full_tensor(tensor) for name, tensor in logits_processor(output, **arguments).items()}


class SequenceParts:
    """Pack the sequences of a micro batch, and take this rank's contiguous part of them.

    `mask` [B, S]. Each sequence is padded to a multiple of TP x CP, so that parts divide over TP too.
    """

    def __init__(self, mask: torch.Tensor):
        from megatron.core import parallel_state

        self._mask = mask.bool()
        self._group = parallel_state.get_context_parallel_group()
        self._size = parallel_state.get_context_parallel_world_size()
        self._rank = parallel_state.get_context_parallel_rank()
        align = parallel_state.get_tensor_model_parallel_world_size() * self._size
        lengths = self._mask.sum(1)
        padded = (lengths + align - 1) // align * align
        self._ends = torch.nn.functional.pad(padded.cumsum(0), (1, 0)).int()
        row, column = self._mask.nonzero(as_tuple=True)
        place = (self._mask.long().cumsum(1) - 1)[row, column]
        self._places = self._ends.long()[row] + place  # place of each token in the packed sequence
        self._tokens = int(self._ends[-1])

    def local_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `tensor` [B, S]: [1, T/cp], 0 in padding."""
        packed = tensor.new_zeros(self._tokens)
        packed[self._places] = tensor[self._mask]
        return packed.chunk(self._size)[self._rank].unsqueeze(0)

    def packed_seq_params(self) -> Any:
        """Return the PackedSeqParams of all sequences, which Ulysses' attention needs."""
        from megatron.core.packed_seq_params import PackedSeqParams

        longest = int(self._ends.diff().max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self._ends,
            cu_seqlens_kv=self._ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cu_seqlens_q_padded=self._ends,
            cu_seqlens_kv_padded=self._ends,
        )

    def full_tensor(self, part: torch.Tensor) -> torch.Tensor:
        """Return [B, S, ...] on every rank from the ranks' parts [1, T/cp, ...]; the gradient goes to the own part."""
        packed = _GatherParts.apply(part[0], self._group)
        found = packed.new_zeros(*self._mask.shape, *packed.shape[1:])
        found[self._mask] = packed[self._places]
        return found


class _GatherParts(torch.autograd.Function):
    """Concatenate all ranks' parts; backward returns the own part's gradient times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.group.size())[ctx.group.rank()] * ctx.group.size(), None
