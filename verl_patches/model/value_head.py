"""Give a Megatron model a value head, which returns one number for each token, in place of the output layer.

verl's own head (verl/models/llama/megatron/layers/parallel_linear.py, LinearForLastLayer) imports flash_attn, and
under sequence parallelism marks its weight but not its bias for the sum of gradients over TP ranks, so that biases
drift apart.
"""

from __future__ import annotations

from typing import Any

import torch


class ValueHead(torch.nn.Module):
    """Map each token's hidden state to one number by the linear layer `score`: weight [1, H], bias [1].

    Every TP rank has the whole layer. Parameters have the dtype of `config`, a TransformerConfig; values are fp32.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.score = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():  # finalize_model_grads sums the gradients of the TP ranks' own tokens
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: Any = None) -> tuple:
        """Return (values [S, B, 1] in fp32, None) of hidden [S / tp, B, H]; GPTModel expects such a pair."""
        from megatron.core import tensor_parallel

        values = self.score(hidden).float()
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def add_value_head(model: Any) -> None:
    """Replace the output layer of a GPTModel by a value head, on the pipeline stage that has the output layer."""
    if model.post_process:
        model.output_layer = ValueHead(model.config)


def initializers() -> dict[Any, Any]:
    """Return the entry of line pypi for verl's MODEL_INITIALIZER_REGISTRY."""
    from verl.models.mcore.model_initializer import DeepseekV3Model
    from verl.models.mcore.registry import SupportedModel

    class Model(DeepseekV3Model):
        def initialize(self, value: bool = False, **kwargs: Any) -> Any:
            """Return this stage's model, with a value head where `value` is true."""
            model = super().initialize(**kwargs)
            if value:
                add_value_head(model)
            return model

    return {SupportedModel.DEEPSEEK_V3: Model}
