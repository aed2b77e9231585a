"""Line a3 on platform cpu: stand-ins for torch_npu, apex, acl, torchair (packages.py) and for MindSpeed's op builders.

attention.py and ops.py hold the reference of each op in plain torch, with the names, kinds and defaults of the real
one, and its refusals. They compute in fp32 at least and round once, where kernels keep bf16 in places: close, not
bit-equal. What a device leaves undefined is refused, or defined in the docstring.
"""
