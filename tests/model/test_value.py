"""Test a critic on Megatron: values against transformers, gradients of all ranks at every layout, its checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model.mindspeed_start import LAYOUTS
from tests.model.parity import RESPONSE_START, SAMPLES, WORD
from tests.near_ties import load_reference_model, near_ties, norm_tolerance
from tests.weights.cases import as_value_model
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import SCORE, SCORE_BIAS
from verl_patches.plan.memory_plan import recompute_keys
from verl_patches.reshard.region import Region
from verl_patches.weights.load import draw_head
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source

SIZES = {
    "pp2": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1},
    "ep2": {},  # the sizes of the tiny configuration
    "dp2": {"expert_model_parallel_size": 1},
    "tp2ep2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
CASES = {name: ("", sizes) for name, sizes in SIZES.items()}
CASES["moved"] = ("", {"param_offload": True, "grad_offload": True, "optimizer_offload": True})
CASES |= {"reduction": ("reduction", SIZES["ep2"]), "bias": ("bias", SIZES["tp2ep2"])}
A3 = {"ep2": "ep2", "tp2ep2": "tp2_extends_ep", "pp2": "pp2_uneven", "reduction": "ep2"}
# recomputed layers of each stage: the critic's worker must take its own stage's number
RECOMPUTED = [f"{key}={value}".replace(" ", "") for key, value in recompute_keys([1, 2]).items()]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(reference):
    """Return the folder of `reference`, with the head of one token."""
    folder = reference["folder"]
    torch.save(reference["weights"]["lm_head.weight"][WORD : WORD + 1].clone(), folder / "word.pt")
    for number in range(2):
        as_value_model(folder / "model", folder / f"reward_{number}", WORD + number)
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param("pypi", marks=pytest.mark.nightly), pytest.param("a3", marks=pytest.mark.upstream)],
)
def found(request, folder, run_ranks):
    """Return {case: answers of each rank}."""
    if request.param == "pypi":
        options = {"size": 2, "backend": "nccl", "patches": "line=pypi,platform=cpu"}
        ranks = run_ranks("tests.model.value_job:layouts_job", folder, CASES, **options)
        return {name: [rank[name] for rank in ranks] for name in CASES}
    run = request.getfixturevalue("run_a3")
    spoilt = {name: name if name not in SIZES else "" for name in A3}
    more = {"pp2": RECOMPUTED}
    return {
        name: run("value_job:a3_job", LAYOUTS[layout], spoilt[name], more=more.get(name, []))
        for name, layout in A3.items()
    }


def layouts(found):
    return [name for name in found if name in SIZES]


def by_sample(ranks, key):
    """Return [samples, R] of the ranks' own samples."""
    values = {sample: row for rank in ranks for sample, row in rank[key].items()}
    return torch.stack([values[sample] for sample in range(SAMPLES)])


def test_a_head_that_is_a_word_gives_the_logits_of_transformers(reference, found):
    rows = torch.arange(SAMPLES) % len(reference["mask"])
    expected = reference["logits"][:, RESPONSE_START - 1 : -1, WORD] * reference["mask"][:, RESPONSE_START:]
    for name in layouts(found):
        assert (by_sample(found[name], "as_word") - expected[rows]).abs().max() < 1e-4, name


def test_reward_models_score_as_transformers_and_as_algo_rm_trains_them(reference, found):
    rows = torch.arange(SAMPLES) % len(reference["mask"])
    last = torch.tensor([row.nonzero().max() for row in reference["mask"]])[rows]
    expected, before = (reference["logits"][rows, at, WORD : WORD + 2] for at in (last, last - 1))
    for name in layouts(found):
        scores = by_sample(found[name], "scored")
        assert (scores - expected).abs().max() < 1e-5 * expected.abs().max(), name
        assert (scores[:, 0] - by_sample(found[name], "behind")).abs().max() < 1e-5, name  # the critic's value
        assert (scores - before).abs().max() > 1e-2, name  # negative control: the token before


def test_the_norm_is_that_of_all_ranks_gradients_at_every_layout(found):
    norms = {name: found[name][0]["norms"] for name in (*layouts(found), *(["moved"] if "moved" in found else []))}
    for name, layout_norms in norms.items():
        for update, (norm, expected) in enumerate(zip(layout_norms, norms["ep2"], strict=True), 1):
            assert norm == pytest.approx(expected, rel=norm_tolerance(update, 1e-4)), (name, norms)
        assert all(rank["norms"] == layout_norms for rank in found[name])
    assert found["reduction"][0]["norms"][0] != pytest.approx(norms["ep2"][0], rel=1e-2)  # negative control


def test_the_drawn_head_is_equal_on_all_ranks_and_stays_so(found):
    drawn = [rank["drawn"] for name in layouts(found) for rank in found[name] if rank["drawn"]]
    assert all(torch.equal(head[0], drawn[0][0]) and not head[1].any() for head in drawn)
    assert drawn[0][0].std() == pytest.approx(1 / math.sqrt(drawn[0][0].numel() + 1), rel=0.3)
    for name in layouts(found):
        first, *others = [rank["head"] for rank in found[name] if rank["head"]]
        assert not torch.equal(first[1], torch.zeros(1))
        assert all(torch.equal(a, b) for head in others for a, b in zip(first, head, strict=True)), name
    if "bias" in found:  # negative control: verl's own head does not mark its bias
        one, other = (rank["head"] for rank in found["bias"])
        assert torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])


def test_a_zero_head_has_the_mean_square_of_the_returns_as_loss(reference, found):
    tokens = reference["mask"][:, RESPONSE_START:].sum(1)[torch.arange(SAMPLES) % len(reference["mask"])]
    squares = torch.linspace(-1, 1, SAMPLES).square()
    expected = ((squares * tokens).sum() / tokens.sum()).item()  # the mean over the mini batch, not over micro batches
    for name in layouts(found):
        losses = [torch.tensor(rank["loss"]).mean() for rank in found[name] if rank["last_stage"]]
        assert torch.stack(losses).mean().item() == pytest.approx(expected, rel=1e-6), name


def test_another_layout_goes_on_from_the_checkpoint(found, folder):
    wrote, *others = layouts(found)  # the first layout to run has written it
    ids, mask, _ = torch.load(folder / "batch.pt")
    ties = near_ties(load_reference_model(found[wrote][0]["checkpoint"]), ids, mask)
    predicted = ties.comparable[torch.arange(SAMPLES) % len(ids), RESPONSE_START - 1 : -1]
    for name in others:
        differs = (by_sample(found[name], "values") - by_sample(found[wrote], "values")).abs()
        assert differs[predicted].max() < 1e-4, name
        assert found[name][0]["norm"] == pytest.approx(found[wrote][0]["norm"], rel=ties.norm_tolerance(1e-4)), name
    assert found[wrote][0]["norm"] != pytest.approx(found[wrote][0]["norms"][0], rel=1e-3)


def test_a_folder_of_a_value_model_gives_its_head_and_no_causal_lm(tiny_model, tmp_path):
    score = as_value_model(tiny_model, folder := tmp_path / "model", 0)
    source = open_source(folder)
    assert SCORE in source.tensors and SCORE_BIAS not in source.tensors and "lm_head.weight" not in source.tensors
    with WeightReader(source) as reader:
        reader.copy(Region(SCORE, 0, 0, 1), found := torch.empty(1, score.shape[1]))
    assert torch.equal(found, score.float())
    draw_head(SCORE_BIAS, bias := torch.ones(1), folder)
    assert not bias.any()
    with pytest.raises(ConfigError, match="expected a causal LM with lm_head.weight, found a value model"):
        draw_head("lm_head.weight", found, folder)


def test_the_learning_rate_is_the_critics_own(found):
    assert {rank["lr"] for ranks in found.values() for rank in ranks} == {0.01}  # the actor's is 0.001
