"""Run line a3 on platform cpu: stand-ins for torch_npu, apex, acl, torchair and for MindSpeed's op builders.

packages.py holds the stand-in modules, mindspeed_ops.py the op builders. Their operators are the functions of
verl_patches/reference, bound by the names, kinds and defaults of the real ones.
"""
