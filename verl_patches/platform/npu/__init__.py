"""The ops of an NPU as this project calls them: thin, checked, differentiable. torch_npu is imported on first use.

Which torch_npu it is does not matter here: the image's on a device, the plain-torch references on platform cpu.
"""
