"""Rows model.train_dtype and model.optimizer_dtype: one dtype from recipe.dtype to the optimizer."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.model.precision import build_in_asked_dtype, optimizer_of_model_dtype


class Section(SimpleNamespace):
    """Stands for a DictConfig."""

    def get(self, name):
        return getattr(self, name, None)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [(Section(dtype="fp32"), torch.float32), (Section(dtype="bf16"), torch.bfloat16), (None, torch.float16)],
)
def test_worker_builds_in_the_recipes_dtype(recipe, expected):
    worker = SimpleNamespace(config=Section(recipe=recipe), dtype=torch.float16, param_dtype=torch.float16)
    assert build_in_asked_dtype(lambda self: self.dtype)(worker) == expected
    assert worker.param_dtype == expected


@pytest.mark.parametrize("bf16", [True, False])
def test_optimizer_follows_the_model(bf16):
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = [SimpleNamespace(config=SimpleNamespace(bf16=bf16, params_dtype=dtype))]
    config = SimpleNamespace(bf16=True, params_dtype=torch.bfloat16)
    optimizer_of_model_dtype(lambda model, config: None)(model, config)
    assert (config.bf16, config.params_dtype) == (bf16, dtype)
