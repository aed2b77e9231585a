"""The head of a value model on Megatron: one number for each token, in the place of the vocabulary's head.

verl's own (verl/models/llama/megatron/layers/parallel_linear.py, LinearForLastLayer) imports flash_attn, and under
sequence parallelism marks its weight but not its bias for the sum of gradients over TP ranks: biases drift apart.
"""

from __future__ import annotations

from typing import Any

import torch


class ValueHead(torch.nn.Module):
    """A linear layer to one number, `score`: weight [1, H], bias [1]; every TP rank has all of it.

    Parameters have the dtype of `config`, a TransformerConfig; values are fp32.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.score = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():  # each TP rank has its own tokens' gradient: finalize_model_grads sums
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: Any = None) -> tuple:
        """([S, B, 1] fp32, None) of hidden [S / tp, B, H], as GPTModel calls its output layer."""
        from megatron.core import tensor_parallel

        values = self.score(hidden).float()
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def add_value_head(model: Any) -> None:
    """Put the head in the place of the vocabulary's, on the stage of a GPTModel that has it."""
    if model.post_process:
        model.output_layer = ValueHead(model.config)


def initializers() -> dict[Any, Any]:
    """Row provider: line pypi's entry for verl's MODEL_INITIALIZER_REGISTRY."""
    from verl.models.mcore.model_initializer import DeepseekV3Model
    from verl.models.mcore.registry import SupportedModel

    class Model(DeepseekV3Model):
        def initialize(self, value: bool = False, **kwargs: Any) -> Any:
            """This stage's model, with a head of one number where `value`."""
            model = super().initialize(**kwargs)
            if value:
                add_value_head(model)
            return model

    return {SupportedModel.DEEPSEEK_V3: Model}
