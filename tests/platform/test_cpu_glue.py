"""CPU stand-ins around verl that need no verl to be looked at."""

import pytest

from verl_patches.platform.cpu.upstream_glue import batch_stays_on_cpu


@pytest.mark.parametrize(("asked", "given"), [("cuda", "cpu"), ("cuda:1", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_row_platform_data_to_cuda(asked, given):
    """Row platform.data_to_cuda: only cuda becomes the CPU."""
    assert batch_stays_on_cpu(lambda self, device: (self, device))("batch", asked) == ("batch", given)
