"""torch_npu.npu.memory: the name that vllm_ascend/device_allocator/camem.py:93 annotates with."""


class NPUPluggableAllocator:
    """Never made here."""
