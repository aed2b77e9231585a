"""Test MindSpeed-LLM's DeepSeek-V3 on Megatron core_r0.8.0, by our engine start, against transformers in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.model import parity
from tests.model.mindspeed_start import LAYOUTS
from tests.near_ties import assert_all_but_few_below, norm_tolerance
from tests.runs import composed

EXPERT_LOAD, JOBS = ["recipe.expert_load=true"], "mindspeed_job"
WORKER = f"{JOBS}:worker_job"
pytestmark = [pytest.mark.slow, pytest.mark.upstream]


@pytest.fixture(scope="session", params=LAYOUTS)
def found(request, run_a3):
    """Return (layout, each rank's findings)."""
    return request.param, run_a3(f"{JOBS}:parity_job", LAYOUTS[request.param])


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_logits_are_those_of_transformers(found, reference, how):
    name, ranks = found
    logits = [rank[how] for rank in ranks if rank[how] is not None]
    assert len(logits) == (1 if name == "pp2_uneven" else len(ranks))
    assert max(parity.logits_error(reference, rank) for rank in logits) < 1e-4


def test_gradients_are_those_of_transformers(found, reference):
    name, ranks = found
    errors = parity.gradient_errors(reference["gradients"], parity.whole_gradients([{name: r} for r in ranks], name))
    assert max(errors.values()) < 1e-3, sorted(errors.items(), key=lambda e: -e[1])[:5]


def test_rollout_gets_every_weight_with_its_bias(found, reference):
    sent = found[1][0]["synced"]
    assert sent.keys() == reference["weights"].keys()
    assert all(torch.equal(sent[name], weight.float()) for name, weight in reference["weights"].items())


def test_attention_asks_for_lengths_once_a_forward(run_a3):
    (found,) = run_a3(f"{JOBS}:attention_job")
    assert found == [{"tolist": n, "repeat_interleave": n, "attention": 4 * n} for n in (1, 2)]  # 4 layers


def test_layer_list_decides_the_stages(found):
    name, ranks = found
    assert [r["layers"] for r in ranks] == ([[1], [2, 3, 4]] if name == "pp2_uneven" else [[1, 2, 3, 4]] * len(ranks))


def test_wrong_weights_are_seen(run_a3, reference):
    (found,) = run_a3(f"{JOBS}:controls_job")
    assert parity.logits_error(reference, found["nothing"]) < 1e-4
    assert parity.logits_error(reference, found["bias"]) > 1e-2
    assert parity.logits_error(reference, found["columns"]) > 1e-1


def test_correction_bias_stays_fp32_in_a_bf16_model(run_a3, reference):
    ranks = run_a3(f"{JOBS}:bf16_job", LAYOUTS["tp2_extends_ep"], dtype="bf16")
    stored = [w for name, w in reference["weights"].items() if name.endswith("correction_bias")]
    for rank in ranks:
        assert rank["dtypes"] == {"torch.bfloat16"}
        assert all(torch.equal(bias, w) for bias, w in zip(rank["after"].values(), stored, strict=True))
        # in bf16 some tokens go to other experts
        assert 1e-4 < parity.logits_error(reference, rank["logits"].float()) < 0.5


@pytest.fixture(scope="session")
def one_rank(run_a3):
    """Return the worker's updates on one rank in fp32."""
    return run_a3(WORKER)[0]


def _grad_norms(rank) -> list[float]:
    return [step["actor/grad_norm"][0] for step in rank["metrics"]]


def assert_same_norms(found, expected):
    """Assert equal gradient norms of both updates, within a relative 1e-5 where no near tie can be."""
    for update, (norm, other) in enumerate(zip(_grad_norms(found), _grad_norms(expected), strict=True), 1):
        assert norm == pytest.approx(other, rel=norm_tolerance(update, 1e-5)), update


@pytest.mark.parametrize("layout", ["tp2_extends_ep", "pp2_uneven", "tp2_ep2"])
def test_updates_of_verls_worker_are_equal_across_layouts(run_a3, one_rank, layout):
    ranks = run_a3(WORKER, LAYOUTS[layout])
    for rank in ranks:
        assert_same_norms(rank, one_rank)
        same = (one_rank["ids"][:, None] == rank["ids"][None]).all(-1).int().argmax(0)  # indices in one_rank
        for there, here in zip(one_rank["log_probs"], rank["log_probs"], strict=True):
            assert_all_but_few_below((here - there[same]).abs(), 1e-3)


def test_an_update_changes_what_the_next_one_sees(one_rank):
    first, second = _grad_norms(one_rank)
    assert abs(first - second) > 0.1
    assert (one_rank["log_probs"][0] - one_rank["log_probs"][1]).abs().mean() > 0.01


def test_updates_with_entropy_in_the_loss_are_equal_across_layouts_and_to_verls(run_a3, one_rank):
    more = ["actor_rollout_ref.actor.entropy_coeff=0.1"]
    (alone,) = run_a3(WORKER, more=more)
    for found in run_a3(WORKER, LAYOUTS["tp2_extends_ep"], more=more):
        assert_same_norms(found, alone)
    assert abs(_grad_norms(alone)[0] / _grad_norms(one_rank)[0] - 1) > 1e-3
    (verls,) = run_a3(WORKER, more=more, off=",-logprob.*in_chunks")
    assert _grad_norms(verls) == pytest.approx(_grad_norms(alone), rel=1e-6)
    assert torch.allclose(verls["log_probs"][0], alone["log_probs"][0], rtol=0, atol=1e-6)


RECOMPUTED = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_"
ALL_LAYERS = [f"{RECOMPUTED}granularity=full", f"{RECOMPUTED}method=block", f"{RECOMPUTED}num_layers=4"]
ALL_LAYERS.append("actor_rollout_ref.model.enable_gradient_checkpointing=true")


# of both 256-die configurations
PRODUCTION = "moe_alltoall_overlap_comm", "gemm_gradient_accumulation_fusion", "swap_optimizer"
FP32_PRODUCTION = dict.fromkeys(PRODUCTION[:2], True)  # fp32 has no swap
WGRAD = ("gradient_accumulation_fusion", "gemm_gradient_accumulation_fusion", "unpadded_attention")
FUSED_KERNELS = ("rmsnorm", "swiglu", "rotary_pos_emb", "moe_token_permute_and_unpermute")


def recomputed(layers):
    return [*ALL_LAYERS[:2], ALL_LAYERS[3], f"{RECOMPUTED}num_layers={layers}"]


# layout, keys of recipe.train, overrides, function that must have been called
SAME_UPDATE_CASES = [
    ("tp1", {}, ALL_LAYERS, None),
    *(("tp1", {f"use_fused_{kernel}": False}, [], None) for kernel in FUSED_KERNELS),
    *((layout, {key: True}, [], key) for layout in ("tp1", "tp2_extends_ep") for key in WGRAD),
    ("tp2_extends_ep", {"moe_alltoall_overlap_comm": True}, [], None),
    *(("tp2_extends_ep", FP32_PRODUCTION, recomputed(n), "gemm_gradient_accumulation_fusion") for n in (0, 4)),
    # all on, and each off alone
    ("tp2_ep2", FP32_PRODUCTION, recomputed(2), "gemm_gradient_accumulation_fusion"),
    ("tp2_ep2", FP32_PRODUCTION, [], "gemm_gradient_accumulation_fusion"),
    *(("tp2_ep2", FP32_PRODUCTION | {key: False}, recomputed(2), None) for key in FP32_PRODUCTION),
]


@pytest.mark.parametrize(("layout", "train", "more", "called"), SAME_UPDATE_CASES)
def test_each_setting_gives_the_same_update(run_a3, one_rank, layout, train, more, called):
    """Check recomputed layers, each fused kernel off, each fused gradient on, overlapped exchanges, and production."""
    for found in run_a3(WORKER, LAYOUTS[layout], train=train, more=more):
        assert_same_norms(found, one_rank)
        assert called is None or found["calls"][called] > 0 == one_rank["calls"][called]


@pytest.mark.parametrize("layers", [[1, 2], [0, 3]])
def test_each_stage_recomputes_its_own_number_of_layers(run_a3, one_rank, layers):
    ranks = run_a3(WORKER, LAYOUTS["pp2_uneven"], more=recomputed(layers))
    for found, number in zip(ranks, layers, strict=True):
        assert_same_norms(found, one_rank)
        assert found["calls"]["recomputed"] == number * ranks[1]["calls"]["recomputed"] // layers[1]
    assert ranks[1]["calls"]["recomputed"] > 0 == one_rank["calls"]["recomputed"]


@pytest.mark.nightly
def test_swapped_optimizer_gives_the_same_update(run_a3):
    """Check it in bf16: alone, with the other settings of production, and off among these."""
    train = composed("deepseekv3_256die_true_weight").recipe.train
    assert all(getattr(train, key) for key in PRODUCTION)
    plain, swapped, without, all_three = (
        run_a3(WORKER, LAYOUTS["tp2_extends_ep"], train=dict.fromkeys(keys, True), more=ALL_LAYERS, dtype="bf16")
        for keys in ((), PRODUCTION[2:], PRODUCTION[:2], PRODUCTION)
    )
    for off, on in (plain, swapped), (without, all_three):
        assert {found["optimizer"] for found in off} == {"DistributedOptimizer"}
        assert {found["optimizer"] for found in on} == {"SwapDistributedOptimizer"}
        assert [*map(_grad_norms, on)] == [*map(_grad_norms, off)]
    for found, alone in zip(all_three, swapped, strict=True):
        assert _grad_norms(found) == pytest.approx(_grad_norms(alone), rel=1e-3)
        assert (
            found["calls"]["gemm_gradient_accumulation_fusion"]
            > 0
            == alone["calls"]["gemm_gradient_accumulation_fusion"]
        )


def test_balanced_routing_is_not_the_models(run_a3, one_rank):
    (found,) = run_a3(WORKER, train={"balanced_routing": True}, more=EXPERT_LOAD)
    assert abs(_grad_norms(found)[0] - _grad_norms(one_rank)[0]) > 0.1
    even = dict.fromkeys(("max_over_mean", "mean_over_layers", "ranks_over_mean"), 1.0)
    assert found["load"]["train"] == {**even, "layers": 3}
    assert one_rank["load"] is None


@pytest.mark.parametrize("layout", ["pp2_uneven", "tp2_extends_ep"])
def test_the_models_own_routing_is_uneven_and_every_rank_says_so(run_a3, layout):
    """Check the loads of all ranks; a stage with dense layers alone has none."""
    first, *others = [found["load"]["train"] for found in run_a3(WORKER, LAYOUTS[layout], more=EXPERT_LOAD)]
    assert first["layers"] == 3 and first["max_over_mean"] >= first["mean_over_layers"] > 1.1 and others == [first]
    ranks = first["ranks_over_mean"]  # loads of the experts on a rank average out
    assert ranks == 1 if layout == "pp2_uneven" else 1 < ranks < first["mean_over_layers"], first


def test_learning_rate_follows_the_schedule(run_a3, one_rank):
    optim = "actor_rollout_ref.actor.optim."
    more = [f"{optim}warmup_style=cosine", f"{optim}total_training_steps=4", f"{optim}lr_warmup_steps=1"]
    (found,) = run_a3(WORKER, more=more)
    assert [step["actor/lr"] for step in found["metrics"]] == [[0.0], [1e-3]]
    assert [step["actor/lr"] for step in one_rank["metrics"]] == [[1e-3], [1e-3]]
    assert found["log_probs"][0].equal(found["log_probs"][1])  # no weight moved at rate 0
