"""Test that Megatron and our loader load Megatron's own checkpoint from `weights convert` on both lines."""

import pytest
import torch

from tests.model.mindspeed_start import LAYOUTS
from verl_patches.layout.parallel import parse_layout
from verl_patches.weights.convert import convert
from verl_patches.weights.megatron import ITERATION_FOLDER
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

EIGHT = {"pipeline_model_parallel_size": 2, "layers": [1, 3]}
CASES = {  # name -> ranks and sizes of the engine, our layout; of Moonlight where the name begins so
    "ep2": (LAYOUTS["ep2"], "ep2 @2"),
    "tp2": (LAYOUTS["tp2"], "tp2 @2"),
    "tp2_ep2": (LAYOUTS["tp2_ep2"], "tp2 ep4 etp1 @4"),
    "moonlight_tp2_ep2": (LAYOUTS["tp2_ep2"], "tp2 ep4 etp1 @4"),
    "tp2_pp2_ep2": ((8, {**LAYOUTS["tp2_ep2"][1], **EIGHT}), "tp2 pp2 ep4 etp1 @8 layers=1,3"),
}


def converted(model, folder, layout, line):
    convert(plan_conversion(open_source(model), parse_layout(layout), "keep", line=line), folder, processes=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_megatrons_load_checkpoint_reads_it(case, run_a3, reference, family, tmp_path):
    layout, text = CASES[case]
    model = (family("moonlight") if case.startswith("moonlight") else reference)["folder"]
    folder = converted(model / "model", tmp_path / "megatron", text, "a3")
    ranks = run_a3("megatron_folder_job:load_checkpoint_job", layout, folder, folder=model)
    assert ranks == [[]] * layout[0]
    if case == "ep2":
        path = folder / ITERATION_FOLDER / "mp_rank_00_001" / "model_optim_rng.pt"
        state = torch.load(path, weights_only=True)
        state["model"]["decoder.layers.1.mlp.experts.weight2"][0, 0] += 1
        torch.save(state, path)
        ranks = run_a3("megatron_folder_job:load_checkpoint_job", layout, folder)
        assert ranks == [[], ["decoder.layers.1.mlp.experts.weight2"]]  # negative control


@pytest.mark.slow
def test_a_run_of_another_layout_reads_it(run_a3, reference, tmp_path):
    folder = converted(reference["folder"] / "model", tmp_path / "megatron", CASES["tp2_ep2"][1], "a3")
    assert run_a3("megatron_folder_job:our_loader_job", LAYOUTS["pp2_uneven"], folder) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "moonlight"])
def test_a_model_of_line_pypi_loads_its_file_strictly(name, tiny_model, family, tmp_path, run_ranks):
    model = tiny_model if name == "deepseek_v3" else family(name)["folder"] / "model"
    layouts = ("pp2 @2", "tp2 @2", "tp2 ep2 etp1 @2")
    folders = {text: converted(model, tmp_path / text, text, "pypi") for text in layouts}
    options = {"patches": "line=pypi,platform=cpu", "backend": "nccl", "size": 2}
    ranks = run_ranks("tests.model.megatron_folder_job:load_state_dict_job", model, folders, **options)
    assert ranks == [dict.fromkeys(layouts, [])] * 2
