"""Build DeepSeek-V3 from MindSpeed-LLM 2.0.0's modules on Megatron core_r0.8.0 (line a3).

This table has every difference from line pypi:

| part | pypi (megatron-core 0.12.2) | a3 | file |
|---|---|---|---|
| settings | fields of MLATransformerConfig | arguments that modules read by get_args() | arguments.py, start.py |
| parameter names | Megatron's own | other in MLA; q and kv down projections are one tensor | reshard/parameters.py |
| experts | one module an expert | weight1 and weight2 hold all local experts | reshard/parameters.py |
| down projections | cut by TP | whole on every TP rank | layout/sharding.py, LIBRARIES["mindspeed"] |
| attention | a stand-in, or Transformer Engine | torch_npu.npu_fusion_attention | model.py, platform/npu/attention.py |
| correction bias of a bf16 model | Megatron makes it fp32 again | our code keeps it fp32 | compat.py |
| names that verl imports | Megatron has them | some are absent from core_r0.8.0 | compat.py |
| RoPE of packed sequences | Megatron's | MLA hands over another shape | compat.py |
| weights for vLLM | verl's per_tensor_generator | one of ours: verl's needs what 0.8.0 lacks | worker/models.py |

Both lines share the inventory, the sharding table, the reading of HF tensors, verl's forward and the tiny model.
"""
