"""Test the arguments and parameters of verl's in-process vLLM engine."""

from __future__ import annotations

import contextlib
import gc
import json

import pytest
from transformers import PretrainedConfig

from tests.conftest import ROOT
from verl_patches.model.tiny import make_tiny_model
from verl_patches.rollout.engine import engine_arguments


def test_image_arguments_go_only_without_a_limit():
    """Test row rollout.llm_arguments."""
    plain = {"model": "m", "quantization": "ascend"}
    of_text = {**plain, "limit_mm_per_prompt": None, "disable_mm_preprocessor_cache": True}
    of_images = {**of_text, "limit_mm_per_prompt": {"image": 1}}
    assert engine_arguments(of_text) == plain and engine_arguments(of_images) == of_images


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
    """Check the override of recipe.num_hidden_layers; tests/loop/test_layouts.py uses vLLM's own loader."""
    overrides = {} if layers is None else {"num_hidden_layers": layers}
    config = PretrainedConfig(num_hidden_layers=4, num_nextn_predict_layers=1)
    config.model_type = "deepseek_v3"
    config = engine_arguments({"model": "m", "hf_overrides": overrides})["hf_overrides"](config)
    assert (config.num_hidden_layers, config.num_nextn_predict_layers) == (layers or 4, of_mtp)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_collector_rests_while_the_engine_generates_and_is_as_before_afterwards(wanted, enabled, fails):
    from verl_patches.worker.rollout_engine import garbage_collection_off

    was, collections = gc.isenabled(), []
    (gc.enable if enabled else gc.disable)()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with contextlib.suppress(ZeroDivisionError), garbage_collection_off(wanted):
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


@pytest.mark.slow
def test_preemptions_of_v0_are_counted_once(run_rollout, tiny_model, requests):
    longer = [[prompt, 64] for prompt, _ in requests]
    ((before, among, after),) = run_rollout("engine_rank:preemptions", str(tiny_model), longer)
    assert (before, after) == (0, 0) and among > 0


@pytest.mark.slow
@pytest.mark.upstream
def test_preemptions_of_v1_are_those_that_vllm_notes(run_emulated, tmp_path):
    shape = json.loads((ROOT / "configs/model/deepseekv3_tiny_256experts.json").read_text())
    model = make_tiny_model(tmp_path / "model", overrides=shape | {"num_hidden_layers": 2})
    ((ours, theirs),) = run_emulated("tests.rollout.engine_rank:preemptions_of_v1", str(model), backend=None)
    assert ours == theirs > 0
