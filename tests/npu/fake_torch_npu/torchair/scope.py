"""torchair.scope: names that vllm_ascend/utils.py imports."""

from torchair import refused

npu_stream_switch, npu_wait_tensor = refused("scope.npu_stream_switch"), refused("scope.npu_wait_tensor")
