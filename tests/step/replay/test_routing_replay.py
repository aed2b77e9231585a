"""Test routing replay: rows, keys, the selection, counts and refusals; then whole models on ranks.

With spoilt correction biases the replayed model equals the recorded one, transformers' in fp32. The correction bias
affects only the selection of experts, so with equal experts logits and all gradients, the router's too, are those of
the model with its own biases.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from tests.model import parity
from tests.model.mindspeed_start import LAYOUTS, engine_config
from verl_patches.errors import RecipeError
from verl_patches.step.replay.routing_replay import RoutingReplay, attach_micro_batch, current_replay, replay_experts

E, K, LAYERS = 8, 2, 2
IDS = torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]).bool()


def preprocess(ids, mask, pre_process=True):
    """Pack as verl at TP 2: each sequence padded on the right to an even length."""
    rows = [torch.nn.functional.pad(row[keep], (0, int(keep.sum()) % 2)) for row, keep in zip(ids, mask, strict=True)]
    return torch.cat(rows)[None], SimpleNamespace()


def select_upstream(logits, topk, expert_bias=None, num_groups=None, group_topk=None, scaling_factor=None):
    """Return (gates [N, E], map [N, E], tokens per expert), as Megatron does."""
    scores = logits.sigmoid()
    chosen = (scores + expert_bias).topk(topk, dim=1).indices
    gates = scores.gather(1, chosen)
    gates = gates / gates.sum(-1, keepdim=True) * scaling_factor
    mask = torch.zeros_like(logits).scatter(1, chosen, 1).bool()
    return torch.zeros_like(logits).scatter(1, chosen, gates), mask, mask.sum(0)


class Layer(torch.nn.Module):
    """Stand in for a decoder layer whose router gets the logits unchanged."""

    def __init__(self, number, experts=E):
        super().__init__()
        self.layer_number, self.mlp = number, torch.nn.Module()
        self.mlp.router = torch.nn.Module()
        self.mlp.router.config = SimpleNamespace(num_moe_experts=experts)
        self.select = replay_experts(select_upstream)

    def forward(self, logits, bias, packed_seq_params=None):
        return self.select(logits, K, expert_bias=bias, num_groups=4, group_topk=2, scaling_factor=2.5)


@pytest.fixture
def model():
    layers = torch.nn.ModuleList(Layer(number) for number in (2, 3))
    return layers, RoutingReplay([layers])


def make_logits(layer, tokens=6):
    return torch.randn(tokens, E, generator=torch.Generator().manual_seed(layer))


def forward(layers, ids=IDS, mask=MASK, logits=make_logits, bias=0.0):
    _, params = attach_micro_batch(preprocess)(ids, mask)
    return [layer(logits(at), torch.full((E,), bias), packed_seq_params=params) for at, layer in enumerate(layers)]


def test_recorded_experts_are_selected_with_the_gates_of_the_routers_own_scores(model):
    layers, replay = model
    with replay.recording():
        recorded = forward(layers)
    other = [make_logits(at + 10).requires_grad_() for at in range(LAYERS)]
    with replay.replaying():
        found = forward(layers, logits=other.__getitem__)
    for logits, (_, mask, _), (gates, replayed, counts) in zip(other, recorded, found, strict=True):
        real = torch.tensor([0, 1, 2, 4, 5])  # the token in place 3 is padding: the router's own choice
        assert replayed[real].equal(mask[real]) and counts.equal(replayed.sum(0))
        scores = logits.sigmoid() * replayed
        assert torch.allclose(gates, 2.5 * scores / scores.sum(-1, keepdim=True))
        (gates * torch.arange(E)).sum().backward()
        assert (logits.grad[real].abs() > 0).equal(mask[real])
    counts = replay.end_step()
    own = [logits.sigmoid().topk(K, 1).indices for logits in other]
    pairs = zip(recorded, own, strict=True)
    equal = sum(int(mask[real].gather(1, indices[real]).sum()) for (_, mask, _), indices in pairs)
    assert counts == {"equal": equal, "of": 5 * K * LAYERS, "bytes": LAYERS * 5 * K} and equal < counts["of"]
    assert replay.samples == {} and current_replay.value is None


def test_ids_above_255_are_recorded_whole():
    """Check Kimi-K2's 384 experts, whose ids do not fit a byte."""
    layers = torch.nn.ModuleList([Layer(2, experts=384)])
    replay = RoutingReplay([layers])

    def route(seed):
        _, params = attach_micro_batch(preprocess)(IDS, MASK)
        logits = torch.randn(6, 384, generator=torch.Generator().manual_seed(seed))
        return layers[0](logits, torch.zeros(384), packed_seq_params=params)[1]

    with replay.recording():
        recorded = route(0)
    with replay.replaying():
        real = torch.tensor([0, 1, 2, 4, 5])  # without the token that is padding
        assert route(1)[real].equal(recorded[real]) and recorded[real, 256:].any()
    assert replay.end_step()["bytes"] == 2 * 5 * K


def test_samples_are_found_by_their_tokens_in_another_packing_and_order(model):
    layers, replay = model
    with replay.recording():
        recorded = forward(layers)
    rows = torch.tensor([1, 0])
    padded = torch.nn.functional.pad(IDS[rows], (2, 0)), torch.nn.functional.pad(MASK[rows], (2, 0))
    with replay.replaying():
        found = forward(layers, *padded, logits=lambda at: torch.zeros(6, E))
    for (_, mask, _), (_, replayed, _) in zip(recorded, found, strict=True):
        assert replayed[:2].equal(mask[4:]) and replayed[2:5].equal(mask[:3])


def test_outside_a_pass_and_in_another_model_nothing_is_replayed(model):
    layers, replay = model
    assert forward(layers)[0][1].equal(select_upstream(make_logits(0), K, torch.zeros(E), scaling_factor=1.0)[1])
    with replay.recording():
        forward(layers)
    assert len(replay.samples) == 2 and "recipe_micro_batch" not in vars(attach_micro_batch(preprocess)(IDS, MASK)[1])


@pytest.mark.parametrize("fault", ["unknown sample", "outside"])
def test_what_cannot_be_replayed_is_refused(model, fault):
    layers, replay = model
    with replay.recording():
        forward(layers)
    calls = {
        "unknown sample": (lambda: forward(layers, IDS + 1), "2 of 2 samples .* recorded 2 samples; expected the"),
        "outside": (lambda: layers[0].select(make_logits(0), K, expert_bias=0.0), "outside its layer, .* whole layers"),
    }
    call, words = calls[fault]
    with replay.replaying(), pytest.raises(RecipeError, match=words):
        call()
    assert current_replay.value is None


def test_a_layer_that_did_not_record_is_refused(model):
    layers, replay = model
    with pytest.raises(RecipeError, match="1 of 2 layers recorded"), replay.recording():
        forward(layers[:1])


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PYPI = {
    1: {"tp1": {}, "recomputed": {"overrides": RECOMPUTED}},
    # pipelines first: Megatron forgets to reset the ranks of the embedding groups between layouts
    2: {"pp2": {"pp": 2, "overrides": RECOMPUTED}, "ep2": {"ep": 2}, "tp2": {"tp": 2, "ep": 2, "etp": 1}},
}


def check(reference, ranks, layout):
    logits = [rank[layout] for rank in ranks if rank[layout]["replayed"] is not None]
    assert logits and max(parity.logits_error(reference, rank["replayed"]) for rank in logits) < 1e-4
    errors = parity.gradient_errors(reference["gradients"], parity.whole_gradients(ranks, layout))
    assert max(errors.values()) < 1e-3, sorted(errors.items(), key=lambda e: -e[1])[:5]
    for rank in (rank[layout] for rank in ranks if rank[layout]["layers"]):  # a stage may have dense layers alone
        assert 0 < rank["counts"]["equal"] < 0.9 * rank["counts"]["of"]
        assert all(shape[0] == len(rank["layers"]) for shape in rank["shapes"]) and len(rank["shapes"]) == 3
        tokens, topk = sum(shape[1] for shape in rank["shapes"]), rank["shapes"][0][2]
        assert rank["counts"]["bytes"] == tokens * len(rank["layers"]) * topk  # as plan/expected.py models them
        message = "samples of a micro batch have no recorded experts"
        assert layout.startswith("pp2") or message in rank["dropped"]
    # control: without replay the spoilt biases give other logits
    assert min(parity.logits_error(reference, rank["without"]) for rank in logits) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("size", PYPI)
def test_replayed_experts_give_the_recorded_model(run_ranks, reference, size):
    layouts = {name: dict(sizes) for name, sizes in PYPI[size].items()}
    call = "tests.step.replay.routing_job:layouts_job", reference["folder"], layouts
    ranks = run_ranks(*call, size=size, patches="line=pypi,platform=cpu", backend="nccl")
    for layout in layouts:
        check(reference, ranks, layout)


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("layout", ["tp1", "tp2_extends_ep", "pp2_uneven"])
def test_replayed_experts_give_the_recorded_model_of_mindspeed(a3_sources, run_ranks, reference, layout):
    sources = a3_sources()
    env = {"VERL_PATCHES": "line=a3,platform=cpu", "PYTHONPATH": os.pathsep.join(map(str, sources))}
    size, sizes = LAYOUTS[layout]
    keys = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_"
    more = [f"{keys}granularity=full", f"{keys}method=block", f"{keys}num_layers=4"]
    more.append("actor_rollout_ref.model.enable_gradient_checkpointing=true")
    config = engine_config(reference["folder"] / "model", sources[0], size, {**sizes, "more": more}, "fp32")
    call = "tests.model.mindspeed_start:run", "tests.step.replay.routing_job:mindspeed_job", config, reference["folder"]
    ranks = run_ranks(*call, size=size, env=env, backend=None)
    check(reference, [{layout: rank} for rank in ranks], layout)
