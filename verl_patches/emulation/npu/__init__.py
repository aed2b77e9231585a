"""Run line a3 on a CPU as on platform npu, with an emulated device: platform `npu_emulated`.

The patches of platform npu are applied. DEVICE and ENGINE of rows.py stand in for the device alone: torch device "npu",
torch_npu, torchair, acl, the C extension of vllm-ascend, HCCL. Every tensor is in host memory and of device "cpu"; an
argument "npu" or "cuda" means the CPU. Functions of torch_npu are references in plain torch, bound to the schemas of
its wheel. The platform must be stated, is never the default, and is refused on a machine that may have a device.
"""
