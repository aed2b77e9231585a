"""torch_npu._C."""
