"""Arguments and parameters of verl's in-process vLLM engine."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig
from vllm import SamplingParams

from verl_patches.reshard.live_memory import ABSORBED, post_load
from verl_patches.rollout.engine import engine_arguments, refresh_absorbed_mla, route_in_fp32
from verl_patches.worker.rollout_engine import seeded_apart


def test_image_arguments_go_only_without_a_limit():
    """Row rollout.llm_arguments; with a real LLM: tests/emulation/test_cpu_vllm.py."""
    plain = {"model": "m", "quantization": "ascend"}
    of_text = {**plain, "limit_mm_per_prompt": None, "disable_mm_preprocessor_cache": True}
    of_images = {**of_text, "limit_mm_per_prompt": {"image": 1}}
    assert engine_arguments(of_text) == plain and engine_arguments(of_images) == of_images


def test_requests_of_one_prompt_have_seeds_of_their_own():
    """Validation with val_kwargs.n > 1, over all engines; a training batch has n responses in one request."""
    twice = [{"prompt_token_ids": ids} for ids in ([1, 2], [1, 2], [3])]
    params = SamplingParams(seed=7, temperature=0.5)
    apart = seeded_apart(twice, params, lambda: 0)
    assert [each.seed for each in apart] == [7, 8, 9] and params.seed == 7 and {e.temperature for e in apart} == {0.5}
    assert [each.seed for each in seeded_apart(twice, params, lambda: 2)] == [13, 14, 15]
    for given in (apart, SamplingParams(seed=7, n=2), SamplingParams(seed=7, temperature=0.0), SamplingParams()):
        assert seeded_apart(twice, given, lambda: 0) is given


@pytest.mark.parametrize("overrides", [None, {"n_group": 1}, lambda config: config.update({"n_group": 1}) or config])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "other"])
def test_the_model_view_comes_before_the_callers_own_overrides(overrides, model_type):
    view = engine_arguments({"model": "m", "hf_overrides": overrides})["hf_overrides"]
    config = PretrainedConfig(quantization_config={"quant_method": "fp8"}, n_group=4)
    config.model_type = model_type
    config = view(config)
    assert ("quantization_config" in config.to_dict()) is (model_type == "other")
    assert config.n_group == (4 if overrides is None else 1)


@pytest.mark.parametrize(("layers", "of_mtp"), [(3, 2), (4, 1), (None, 1)])
def test_layers_that_are_left_out_are_passed_over_as_layers_of_mtp(layers, of_mtp):
    """recipe.num_hidden_layers writes the override; with vLLM's own loader: tests/loop/test_layouts.py."""
    overrides = {} if layers is None else {"num_hidden_layers": layers}
    config = PretrainedConfig(num_hidden_layers=4, num_nextn_predict_layers=1)
    config.model_type = "deepseek_v3"
    config = engine_arguments({"model": "m", "hf_overrides": overrides})["hf_overrides"](config)
    assert (config.num_hidden_layers, config.num_nextn_predict_layers) == (layers or 4, of_mtp)


def test_the_router_works_in_fp32():
    """Row rollout.fp32_router; in a real bf16 engine: tests/rollout/test_parity.py."""
    layer = torch.nn.Module()
    layer.gate = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    layer.gate.e_score_correction_bias = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    bias, tokens = layer.gate.e_score_correction_bias, torch.randn(3, 8, dtype=torch.bfloat16)
    rounded = layer.gate(tokens)
    route_in_fp32(lambda self: None)(layer)
    assert layer.gate.e_score_correction_bias is bias and bias.dtype is torch.float32
    exact = layer.gate(tokens)
    assert rounded.dtype is torch.bfloat16 and exact.dtype is torch.float32
    assert torch.equal(exact, tokens.float() @ layer.gate.weight.T) and not torch.equal(exact, rounded.float())


class Absorbing(torch.nn.Module):
    """MLA of one layer as vLLM and vllm-ascend derive its projections from kv_b_proj [N * (P + V), L]."""

    def __init__(self, copies: bool):
        super().__init__()
        self.copies, self.derived, self.kv_b_proj = copies, 0, torch.zeros(2 * (3 + 4), 5)
        self.impl = SimpleNamespace(kv_b_proj=SimpleNamespace(weight=self.kv_b_proj))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.derived += 1
        up_key, up_value = self.kv_b_proj.T.unflatten(1, (2, 3 + 4)).split([3, 4], dim=-1)
        self.impl.W_UV, self.impl.W_UK_T = up_value.transpose(0, 1), up_key.permute(1, 2, 0)
        if self.copies:  # vllm_ascend/attention/mla_v1.py:669
            self.impl.W_UV, self.impl.W_UK_T = self.impl.W_UV.contiguous(), self.impl.W_UK_T.contiguous()

    def projections(self) -> list[torch.Tensor]:
        return [getattr(self.impl, name) for name in ABSORBED]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("how", ["load_weights", "sync", "neither"])
def test_absorbed_projections_follow_new_weights_at_their_old_addresses(copies, how):
    """Row rollout.absorb_mla_again and the weight sync; in engines: test_ascend.py, loop/test_a3_smoke.py."""
    attention = Absorbing(copies)
    layers = [None, SimpleNamespace(self_attn=SimpleNamespace(mla_attn=attention)), None]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers, start_layer=1, end_layer=2))  # one stage of several

    def load_weights(self) -> None:
        attention.kv_b_proj.normal_()

    def load() -> None:
        if how == "load_weights":
            refresh_absorbed_mla(load_weights)(model)
        else:
            load_weights(model)
        if how == "sync":
            post_load(torch.nn.ModuleList([torch.nn.Linear(2, 2), attention]))

    load()
    assert attention.derived == 0  # vLLM derives them when it has all weights
    attention.process_weights_after_loading(torch.float32)
    captured, fresh = attention.projections(), Absorbing(copies=True)  # what a graph reads
    load()
    assert attention.derived == (2 if copies and how != "neither" else 1)
    fresh.kv_b_proj = attention.kv_b_proj
    fresh.process_weights_after_loading(torch.float32)
    for now, held, expected in zip(attention.projections(), captured, fresh.projections(), strict=True):
        assert now.data_ptr() == held.data_ptr()
        assert torch.equal(held, expected) is (how != "neither" or not copies)  # the control: copies are stale


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_collector_rests_while_the_engine_generates_and_is_as_before_afterwards(wanted, enabled, fails):
    from verl_patches.worker.rollout_engine import without_collector

    was, collections = gc.isenabled(), []
    (gc.enable if enabled else gc.disable)()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with contextlib.suppress(ZeroDivisionError), without_collector(wanted):
            cycles = [[] for _ in range(5 * gc.get_threshold()[0])]
            for each in cycles:
                each.append(each)
            inside = len(collections)
            1 / (not fails)
        assert gc.isenabled() == enabled
    finally:
        gc.callbacks.pop()
        (gc.enable if was else gc.disable)()
    assert (inside == 0) == (wanted or not enabled)
