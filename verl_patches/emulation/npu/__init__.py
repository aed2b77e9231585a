"""Platform `npu_emulated`: line a3 as on platform npu, with a device that is only emulated, on a CPU.

The rows of platform npu are on. DEVICE and ENGINE of rows.py stand in for the device alone: torch device "npu",
torch_npu, torchair, acl, the C extension of vllm-ascend, HCCL. Every tensor is in host memory and of device "cpu"; an
argument "npu" or "cuda" means the CPU. Functions of torch_npu are references in plain torch, bound to the schemas of
its wheel. It is stated, never chosen by default, and refused where a device may be.
"""
