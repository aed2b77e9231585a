"""Stands for `torchair.ge`: names that MindSpeed's op builders use in the signatures of their graph converters."""

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


class Tensor:
    """A node of a graph; none is ever made here."""


class TensorSpec:
    """Shape and dtype of a node; none is ever made here."""


class DataType:
    """Element types of nodes; looked at only while a graph is compiled."""
