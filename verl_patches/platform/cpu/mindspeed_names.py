"""What MindSpeed itself puts into torch for a device, changed so that it answers for the CPU."""

from __future__ import annotations

import functools


def type_as_on_a_device(type_wrapper):
    """Row provider for MindSpeed's `type_wrapper`: a CPU tensor too calls itself torch.cuda.FloatTensor.

    MindSpeed puts it over Tensor.type, to turn "npu" in a type's name into "cuda"; here there is no "npu" in it.
    """

    @functools.wraps(type_wrapper)
    def wrap(fn):
        @functools.wraps(fn)
        def type(self, *args, **kwargs):
            found = fn(self, *args, **kwargs)
            return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

        return type_wrapper(type)

    return wrap
