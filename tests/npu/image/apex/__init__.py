"""Stand in for Ascend's apex as the image installs it: NVIDIA's apex at 4ef930c1, which its build script patches.

So apex.normalization.fused_layer_norm has no fused_rms_norm_affine, which NVIDIA added in 2022 and our path does not
use. The import proofs show that these names suffice; none of them can be called.
"""


def refused(name):
    """Return a function or class that can be imported but not called."""

    def call(*args, **kwargs):
        raise RuntimeError(f"apex's {name} was called: it is not apex's, but a test's")

    return call
