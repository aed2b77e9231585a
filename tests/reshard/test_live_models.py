"""Views of real Megatron models: complete, valid through verl's offload, refused for another layout.

That they are the right slices is what the tests of tests/model say, whose models are loaded through the same views.
"""

from __future__ import annotations

import pytest

LAYOUTS = {
    "pp2 vpp2 @2": {},  # pipelines first
    "pp2 @2 layers=1,3": {"overrides": {"num_layers_in_first_pipeline_stage": 1}, "refused": ["pp2 @2", "@2"]},
    "ep2 @2": {"refused": ["tp2 @2"]},
    "tp2 ep2 etp1 @2": {"refused": ["tp2 @2"]},
}


@pytest.mark.slow
def test_views_outlive_verls_offload_and_are_of_their_layout_alone(tiny_model, run_ranks):
    job, patches = "tests.reshard.live_job:job", "line=pypi,platform=cpu"
    expected = {"valid": [True] * 3, "loaded": True, "seen": True, "replaced": False, "rebuilt": True}
    expected["offloaded"] = 0  # but for buffers, which stay
    for rank in run_ranks(job, tiny_model, LAYOUTS, size=2, backend="nccl", patches=patches):
        for text, found in rank.items():
            refused = found.pop("refused")
            assert found == expected, text
            assert len(refused) == len(LAYOUTS[text].get("refused", ()))
            for message in refused:
                assert isinstance(message, str) and "on rank" in message and "expected" in message, text
