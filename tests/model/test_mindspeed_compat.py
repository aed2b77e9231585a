"""What model/mindspeed/compat.py changes in modules, on modules of our own that do what upstream's do."""

import pytest
import torch

from verl_patches.model.mindspeed.compat import count_trained_tokens_only, keep_all_positions


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("local_tokens_per_expert", torch.zeros(3))

    def forward(self, x):
        if torch.is_grad_enabled():  # mindspeed_llm/core/transformer/moe/router.py:526
            self.local_tokens_per_expert += 1
        return x


def layer_of(router):
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    class Layer(BaseMoELayer):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.router = router

        def forward(self, x):
            with torch.enable_grad():  # as MoELayerOverlapAll2All.forward
                return self.router(x)

    return Layer()


@pytest.mark.parametrize("ours", [True, False])
def test_tokens_of_a_pass_without_gradients_are_not_counted(ours):
    layer = layer_of(Router())
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
    if ours:
        count_trained_tokens_only(model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    before = layer.router.local_tokens_per_expert.clone()
    model(torch.ones(1, 2))
    counted = [before.tolist(), layer.router.local_tokens_per_expert.tolist()]
    assert counted == ([[0.0] * 3, [1.0] * 3] if ours else [[1.0] * 3, [2.0] * 3])


def test_each_context_parallel_rank_gets_all_positions():
    rank = 2

    class Rotary(torch.nn.Module):
        def forward(self, max_seq_len, offset=0):
            return (torch.arange(max_seq_len) + offset).chunk(4)[rank]

    rotary = Rotary()
    assert rotary(8).tolist() == [2 * rank, 2 * rank + 1]  # upstream: those of this rank's part
    keep_all_positions(rotary, 4, rank)
    assert rotary(8).tolist() == list(range(8)) and rotary(4, 3).tolist() == [3, 4, 5, 6]
