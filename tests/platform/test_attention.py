"""Test the arguments that fused attention refuses before a device is asked."""

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.platform.npu.attention import fused_attention


def test_the_last_end_of_packed_sequences_is_their_number_of_tokens():
    packed = torch.zeros(4, 2, 8)
    with pytest.raises(ConfigError, match=r"whose last is 4, the tokens; found \[3\]"):
        fused_attention(packed, packed, packed, heads=2, scale=1.0, ends=[3])
