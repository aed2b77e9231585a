"""Run line a3 on platform cpu: stand-ins for torch_npu, apex, acl, torchair and for MindSpeed's op builders.

packages.py holds the stand-in modules. attention.py and ops.py hold the reference of each op in plain torch, with the
names, kinds and defaults of the real one, and its refusals. They compute in fp32 at least and round once, where kernels
keep bf16 in places: results are close, not bit-equal. Where a device leaves a result undefined, the reference refuses
the call or defines the result in its docstring.
"""
