"""Stands for `torchair`, Ascend's graph compiler: MindSpeed's op builders register converters while they are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_patches.platform.cpu.ascend.missing import refuse_unknown
from verl_patches.platform.cpu.ascend.torchair import ge

__all__ = ["ge", "register_fx_node_ge_converter"]
__getattr__ = refuse_unknown(__name__)


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable], Callable]:
    """Decorator for what a graph compiler would call; nothing is compiled here, so nothing is kept."""
    return lambda converter: converter
