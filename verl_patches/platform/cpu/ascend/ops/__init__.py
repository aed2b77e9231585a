"""The references: each op in plain torch, with the names, kinds and defaults of the real one, and its refusals.

They compute in fp32 at least and round once, where kernels keep bf16 in places: close, not bit-equal. What a device
leaves undefined is refused, or defined in the docstring.
"""
