"""Test the family's other models, tiny Moonlight and Kimi-K2, against a newer transformers' figures on both lines.

transformers fixes the epsilon of the latent's norm at 1e-6 where Megatron and vLLM take rms_norm_eps. At Moonlight's
1e-5 that difference alone is 7e-6 of the logits and 1.2e-5 of a gradient; Kimi-K2 differs by 1e-6 and 6e-6.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.model import parity
from tests.model.family_figures import SEEDS, tiny_config
from tests.model.mindspeed_start import LAYOUTS
from tests.weights.cases import is_same, read_folder, run
from verl_patches.layout.model_folder import read_config
from verl_patches.layout.parallel import parse_layout

PYPI_LAYOUTS = {"tp1": {}, "tp2ep2": {"tp": 2, "ep": 2, "etp": 1}}
TP4 = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4, "split": "tp_extend_ep"}
A3_CASES = {
    "moonlight tp1": LAYOUTS["tp1"],
    "moonlight tp2": LAYOUTS["tp2_extends_ep"],
    "moonlight tp4": (4, TP4),
    "kimi_k2 tp2": LAYOUTS["tp2_extends_ep"],
}
LOGITS, GRADIENTS = 1e-5, 3e-5
WORKER = {"patches": "line=pypi,platform=cpu", "backend": "nccl"}
# yarn of factor 40 for all frequencies, and for none, where it scales the softmax alone
YARN = {"rotary_scaling_factor": 40.0, "max_position_embeddings": 64}
MSCALE = {"rotary_scaling_factor": 40.0, "max_position_embeddings": 10**9}
FAULTS = {
    "moonlight": {
        "yarn": YARN, "mscale": MSCALE, "groups": {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    },
    "kimi_k2": {
        "yarn": {"rope_type": "rope"}, "mscale": {"mscale": 0.0, "mscale_all_dim": 0.0},
        "groups": {"moe_router_num_groups": 8, "moe_router_group_topk": 4},
    },
}  # fmt: skip
A3_FAULTS = {
    "yarn": {"rope_scaling_factor": 40.0, "rope_scaling_original_max_position_embeddings": 64},
    "mscale": {"rope_scaling_factor": 40.0, "rope_scaling_original_max_position_embeddings": 10**9},
    "groups": {"n_group": 4, "topk_group": 2},
}
pytestmark = pytest.mark.slow


def logits_error(reference, logits):
    return parity.logits_error(reference, parity.sketch(logits))


def gradient_errors(expected, found):
    """Return {name: estimate of |difference| / |gradient|}: a projection's mean square is the square of the norm."""
    assert found.keys() == expected.keys()
    differences = {name: parity.sketch(found[name].flatten()) - figures[1:] for name, figures in expected.items()}
    return {n: (d.square().mean().sqrt() / expected[n][0].clamp(min=1e-12)).item() for n, d in differences.items()}


def assert_parity(reference, ranks, layout):
    """Assert that logits, gradients, and names and shapes of what verl sends to the rollout are transformers'."""
    errors = [logits_error(reference, rank[layout][form]) for rank in ranks for form in ("packed", "padded")]
    worst = gradient_errors(reference["gradients"], parity.whole_gradients(ranks, layout))
    assert max(errors) < LOGITS
    assert max(worst.values()) < GRADIENTS, sorted(worst.items(), key=lambda e: -e[1])[:5]
    sent = ranks[0][layout]["synced"]
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == reference["shapes"]
    assert all(torch.equal(sent[name], weight.float()) for name, weight in reference["weights"].items())


@pytest.mark.parametrize("name", SEEDS)
def test_line_pypi_computes_what_transformers_does(family, run_ranks, name):
    job = "tests.model.parity_job:layouts_job"
    ranks = run_ranks(job, family(name)["folder"], PYPI_LAYOUTS, size=2, **WORKER)
    for layout in PYPI_LAYOUTS:
        assert_parity(family(name), ranks, layout)


@pytest.mark.upstream
@pytest.mark.parametrize("case", A3_CASES)
def test_line_a3_computes_what_transformers_does(family, run_a3, case):
    reference = family(case.partition(" ")[0])
    found = run_a3("mindspeed_job:parity_job", A3_CASES[case], folder=reference["folder"])
    assert_parity(reference, [{case: rank} for rank in found], case)


@pytest.mark.parametrize(("name", "line"), [("moonlight", "pypi"), ("moonlight", "a3"), ("kimi_k2", "a3")])
def test_weights_go_to_megatron_and_back_bit_for_bit(family, tmp_path, name, line):
    """Convert to Megatron's files of two layouts and export: names and shapes are transformers'."""
    layout, other = parse_layout("tp2 pp2 ep4 etp1 @8 layers=1,3"), parse_layout("tp4 ep8 etp1 @8")
    run(family(name)["folder"] / "model", tmp_path / "megatron", layout, line=line)
    run(tmp_path / "megatron", tmp_path / "other", other, line=line)
    run(tmp_path / "other", tmp_path / "back")
    found = read_folder(tmp_path / "back")
    assert is_same(found, family(name)["weights"])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == family(name)["shapes"]
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == tiny_config(name)


def rope_cases(folder):
    """Return plain positions as layout/model_folder.py gives them, of tiny and of real sizes, and yarn of factor 40."""
    config, yarn = read_config(folder / "model"), tiny_config("deepseekv3")["rope_scaling"]
    one = config["rope_scaling"]
    tiny, real = (config["qk_rope_head_dim"], config["rope_theta"]), (64, 50000.0)
    return [(*tiny, one), (*real, one | {"original_max_position_embeddings": 8192}), (*tiny, yarn)]


@pytest.mark.parametrize("library", ["megatron", "vllm", pytest.param("mindspeed", marks=pytest.mark.upstream)])
def test_yarn_of_factor_1_is_plain_rope(library, request, family, run_ranks):
    folder = family("moonlight")["folder"]
    cases = rope_cases(folder)
    if library == "mindspeed":
        ranks = request.getfixturevalue("run_a3")("rope_job:by_mindspeed", (1, {}), cases, folder=folder)
    else:
        ranks = run_ranks(f"tests.model.rope_job:by_{library}", cases, **WORKER)
    same = [is_plain(*case[:2], *found) for case, found in zip(cases, ranks[0], strict=True)]
    assert same == [True, True, False]


def is_plain(dim, base, frequencies, scale, softmax):
    """Return whether frequencies are plain rope's bit for bit, and both scales 1."""
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return torch.equal(frequencies, plain) and scale == softmax == 1


@pytest.mark.parametrize("name", SEEDS)
def test_a_fault_is_seen_on_line_pypi(family, run_ranks, name):
    (found,) = run_ranks("tests.model.parity_job:controls_job", family(name)["folder"], FAULTS[name], **WORKER)
    errors = {fault: logits_error(family(name), logits) for fault, logits in found.items()}
    assert errors.pop("nothing") < LOGITS
    assert min(errors.values()) > 100 * LOGITS, errors


@pytest.mark.upstream
@pytest.mark.parametrize("layout", ["tp1", "tp2_extends_ep"])
def test_a_fault_is_seen_on_line_a3(family, run_a3, layout):
    """Check also MindSpeed-LLM's own path without q_lora_rank, which is right at TP1 alone."""
    reference = family("moonlight")
    for found in run_a3("mindspeed_job:family_controls_job", LAYOUTS[layout], A3_FAULTS, folder=reference["folder"]):
        errors = {fault: logits_error(reference, logits) for fault, logits in found.items()}
        right = {"nothing", "upstream"} if layout == "tp1" else {"nothing"}
        assert max(errors[fault] for fault in right) < LOGITS
        assert min(errors[fault] for fault in errors.keys() - right) > 100 * LOGITS, errors
