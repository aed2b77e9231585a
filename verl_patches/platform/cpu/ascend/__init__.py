"""What `import torch_npu`, `apex`, `acl` and `torchair` give on platform cpu, line a3: the folders mirror their names.

Only names that MindSpeed, MindSpeed-LLM and verl really use are there; any other is an AttributeError that says where
to add it, or why it is left out (not_on_our_paths.py). `ops/` holds the reference of each op. On platform npu nothing
of this is installed.
"""
