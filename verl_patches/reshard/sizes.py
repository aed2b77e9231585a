"""How many bytes a region takes between ranks. No torch.

Inside one segment (all that one rank sends to another in one bucket) regions lie in order, each from a multiple of
ALIGN_BYTES on, so that a receiver can view its bytes in any dtype.
"""

from __future__ import annotations

from verl_patches.layout.inventory import DTYPE_BYTES, Parameter
from verl_patches.reshard.region import Region

ALIGN_BYTES = 16


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def row_bytes(parameter: Parameter, axis: int) -> int:
    """Bytes of one row (column) of `parameter` along `axis`, in its wire dtype: the inventory's."""
    return parameter.count // parameter.shape[axis] * DTYPE_BYTES[parameter.dtype]


def wire_bytes(parameter: Parameter, region: Region) -> int:
    """Bytes that `region`, a part of `parameter`, takes in a segment: those of its elements, aligned."""
    return align((region.stop - region.start) * row_bytes(parameter, region.axis))
