"""Test patches that skip host work of a decode step: equal responses, on vLLM V1 with vllm-ascend's Python."""

import json

import pytest

from tests.conftest import ROOT
from tests.rollout.decode_step import ROWS
from verl_patches.model.tiny import make_tiny_model


@pytest.mark.slow
@pytest.mark.upstream
def test_responses_are_equal_where_requests_end_at_different_steps(tmp_path, run_emulated):
    shape = json.loads((ROOT / "configs/model/deepseekv3_tiny_256experts.json").read_text())
    model = make_tiny_model(tmp_path / "model", overrides=shape | {"num_hidden_layers": 2})
    env = {"TORCHDYNAMO_DISABLE": "1", "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE": "1"}
    (found,) = run_emulated("tests.rollout.decode_step:uneven", str(model), env=env, backend=None)
    assert found.pop("control") is False
    assert found.pop("reasons") == ["length", "stop"]
    assert found.pop("freed") > 12  # some requests were preempted and computed again
    assert found.pop("alike") > 0
    assert found.pop("preempted") == found.pop("by vLLM") > 0
    assert found == dict.fromkeys([*ROWS, "all", "text", "some log-probs", "one prompt"], True)
