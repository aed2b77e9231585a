"""The dtype that actor and reference are built in: `recipe.dtype`, which verl's workers see as `config.recipe.dtype`.

verl 0.4.0 knows bfloat16 only: megatron_workers.py:334 writes it down, megatron_utils.py:207 does so for the optimizer.
fp32 is for finding errors: it tells a wrong weight from rounding.
"""

from __future__ import annotations

import functools

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def optimizer_of_model_dtype(get_megatron_optimizer):
    """Row provider for verl's `get_megatron_optimizer`: no bf16 optimizer for a model that is not bf16."""

    @functools.wraps(get_megatron_optimizer)
    def get(model, config, *args, **kwargs):
        transformer_config = model[0].config
        if not transformer_config.bf16:
            config.bf16 = False
            config.params_dtype = transformer_config.params_dtype
        return get_megatron_optimizer(model, config, *args, **kwargs)

    return get
