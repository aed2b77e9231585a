"""Names that vllm-ascend imports (vllm_ascend/device_allocator/camem.py:26)."""


def memcpy(*args):
    """Refuses: there is no device."""
    raise RuntimeError("acl.rt.memcpy was called without a device")
