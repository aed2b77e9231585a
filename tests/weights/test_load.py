"""Test loading into Megatron models: each kind of folder bit for bit, one read for two models, the wait for a rank."""

import pytest
import torch

from tests.weights.cases import make_folder, make_fp8_folder, run
from verl_patches.layout.model_folder import MTP_LAYERS
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import tiny_config

WORKER = {"patches": "line=pypi,platform=cpu", "backend": "nccl", "size": 2}
LAYOUTS = ["pp2 @2", "tp2 @2", "tp2 ep2 etp1 @2"]  # pipelines first, as in tests/model/test_load.py
# two blocks in most dimensions, and halves that begin inside a block
CONFIG = tiny_config() | {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 160}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return {name: folder} of equal values; "control" has one other value, "deeper" two layers and one of MTP more."""
    base = tmp_path_factory.mktemp("load")
    _, values = make_fp8_folder(base, CONFIG | {"torch_dtype": "bfloat16"})
    make_folder(base / "bf16", CONFIG, tensors=values)
    deeper = CONFIG | {"num_hidden_layers": CONFIG["num_hidden_layers"] + 2}
    more = make_folder(base / "more", deeper) | {f"model.layers.{deeper['num_hidden_layers']}.x": torch.ones(1)}
    make_folder(base / "deeper", deeper | {MTP_LAYERS: 1}, tensors=more | values)
    for name, source, layout in (
        ("megatron", "bf16", "tp2 pp2 ep4 etp1 @8 layers=1,3"),
        ("megatron of fp8", "fp8", "tp4 ep2 @8"),
        ("megatron of one rank", "megatron", "@1"),
    ):
        run(base / source, base / name, parse_layout(layout))
    values["model.layers.1.mlp.experts.3.up_proj.weight"][-1, -1] += 1
    make_folder(base / "control", CONFIG, tensors=values)
    names = ("bf16", "deeper", "fp8", "megatron", "megatron of fp8", "megatron of one rank", "control")
    return {name: base / name for name in names}


@pytest.mark.slow
def test_every_folder_gives_the_same_parameters_at_every_layout(folders, run_ranks):
    ranks = run_ranks("tests.weights.load_job:folders_job", folders, LAYOUTS, CONFIG["num_hidden_layers"], **WORKER)
    for layout in LAYOUTS:
        unlike = {name: [n for rank in ranks for n in rank[layout][name][0]] for name in (*folders, "layout given")}
        assert len(unlike.pop("control")) == 1
        assert unlike == dict.fromkeys(unlike, [])
        for rank in ranks:
            assert rank[layout]["deeper"] == rank[layout]["bf16"]  # the two additional layers are not read
            sizes = {name: size for name, (_, size) in rank[layout].items()}
            assert sizes["fp8"] < 0.75 * sizes["bf16"]  # the embedding, the head and this tiny router are bf16
            assert sizes["megatron"] < 1.3 * sizes["bf16"]  # where TP cuts experts, whole lines of gate and up are read


@pytest.mark.slow
def test_the_actor_copies_the_reference_and_reads_nothing(folders, run_ranks):
    for found in run_ranks(
        "tests.weights.load_job:copies_job", folders["fp8"].parent / "plain", folders["bf16"], **WORKER
    ):
        nothing, size = ([], 0), found["actor after an actor"][1]
        assert size > 0 and found["actor after an actor"][0] == []  # a trained model is not copied from
        assert found["reference"][1] == size and found["reference"][0]  # it was not loaded yet
        assert found["actor"] == found["actor after offload"] == nothing
        assert found["bf16"] == ([], size)  # a model of another dtype reads the folder again
        assert found["another folder"][1] == size and found["another folder"][0]
        unlike, read = found["control"]
        assert len(unlike) == 1 and read == 0  # the changed value came from the reference


def test_the_wait_lasts_as_long_as_a_rank_reads_and_names_those_that_do_not(run_ranks):
    ranks = run_ranks("tests.weights.load_job:wait_job", size=3)
    assert ranks[0]["late"].startswith("FOLDER: rank 0 has loaded it, and for 0 s none of rank 1, 2 has read")
    assert "recipe.timeouts.load_s" in ranks[0]["late"] and all(rank["waited"] for rank in ranks)
