"""Stands where `flash_attn` and `flash_attn.bert_padding` are imported by name; nothing on our paths calls it."""

from __future__ import annotations

from typing import Any


def _refuse(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"flash_attn.bert_padding.{name} was called, but flash_attn is not installed: the FSDP actor needs it, "
            "the Megatron actor does not; set actor_rollout_ref.actor.strategy=megatron"
        )

    return call


index_first_axis = _refuse("index_first_axis")
pad_input = _refuse("pad_input")
rearrange = _refuse("rearrange")
unpad_input = _refuse("unpad_input")
