"""Ascend's apex as the image installs it: the names of NVIDIA's apex at 4ef930c1, which its build script patches.

So apex.normalization.fused_layer_norm has no fused_rms_norm_affine, which NVIDIA added in 2022; of our path nothing
asks for it. That every name here is enough is what the import proofs show; nothing here can be called.
"""


def refused(name):
    """A function or class that may be imported and not used."""

    def call(*args, **kwargs):
        raise RuntimeError(f"apex's {name} was called: it is not apex's, but a test's")

    return call
