"""Names that verl 54c9b736 imports or calls and Megatron core_r0.8.0 does not have.

Megatron is imported inside functions only: rows put these into it while it is half built.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


class MLATransformerConfig:
    """Only a name in verl's annotations: MLA's sizes are MindSpeed-LLM's arguments here."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("Megatron core_r0.8.0 has no MLATransformerConfig: MLA is MindSpeed-LLM's here")


def with_padded_lengths(original: type) -> type:
    """Row provider for PackedSeqParams: two fields more, which verl sets to what cu_seqlens_q and _kv hold."""
    added = [(f"cu_seqlens_{which}_padded", Any, dataclasses.field(default=None)) for which in ("q", "kv")]
    return dataclasses.make_dataclass(original.__name__, added, bases=(original,))


def saver_that_refuses(get_weight_saver: Any) -> Any:
    """Row provider for verl's `get_weight_saver`: DeepSeek-V3 has a saver too, which says that it cannot."""

    @functools.wraps(get_weight_saver)
    def get(arch: str) -> Any:
        return _refuse_to_save if arch == "DeepseekV3ForCausalLM" else get_weight_saver(arch)

    return get


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("there is no saver for DeepSeek-V3 here: leave hf_model out of checkpoint.contents")


def get_gpt_decoder_block_spec(*args: Any, **kwargs: Any) -> Any:
    """What verl's models other than DeepSeek-V3 would call."""
    raise NotImplementedError("Megatron core_r0.8.0 has no get_gpt_decoder_block_spec; line a3 runs DeepSeek-V3 only")


def expert_tensor_parallel_world_size() -> int:
    """Ranks that share one expert: TP, unless TP extends EP."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    return 1 if get_args().moe_tp_extend_ep else parallel_state.get_tensor_model_parallel_world_size()


def expert_tensor_parallel_rank() -> int:
    """This rank's place among those that share its experts."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() if expert_tensor_parallel_world_size() > 1 else 0


def expert_tensor_parallel_group() -> Any:
    """The process group of ranks that share each expert; None where each rank has whole ones."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group() if expert_tensor_parallel_world_size() > 1 else None
