"""Cut packed sequences into the parts of context-parallel ranks, in ranks of Megatron's groups."""

import torch
from megatron.core import parallel_state

from verl_patches.step.batches.packed_forward import SequenceParts


def cut(mask):
    """Return (this rank's part of token ids 1, 2, ..., what all ranks get back, its gradient for a sum) for a mask."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    ids = torch.arange(1.0, mask.numel() + 1).reshape(mask.shape)
    parts = SequenceParts(mask)
    part = parts.local_part(ids).requires_grad_()
    whole = parts.full_tensor(part)
    whole.sum().backward()
    parallel_state.destroy_model_parallel()
    return part.tolist(), whole.tolist(), part.grad.tolist()
