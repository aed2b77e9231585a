"""What routing replay records and replays, without a model: packing, keys, the selection, counts, refusals."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.rollout.log_probs import EXPERTS
from verl_patches.trainer.run import REPLAY_COLUMNS, line, replay_of_step
from verl_patches.worker.context import context
from verl_patches.worker.routing_replay import MicroBatch, RoutingReplay, note_samples, replay_experts

E, K, LAYERS = 8, 2, 2
IDS = torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]).bool()


def preprocess(ids, mask, pre_process=True):
    """verl's packing at TP 2: each sequence padded on the right to an even length."""
    rows = [torch.nn.functional.pad(row[keep], (0, int(keep.sum()) % 2)) for row, keep in zip(ids, mask, strict=True)]
    return torch.cat(rows)[None], SimpleNamespace()


def select_upstream(logits, topk, expert_bias=None, num_groups=None, group_topk=None, scaling_factor=None):
    """As Megatron's: (gates [N, E], map [N, E], tokens per expert)."""
    scores = logits.sigmoid()
    chosen = (scores + expert_bias).topk(topk, dim=1).indices
    gates = scores.gather(1, chosen)
    gates = gates / gates.sum(-1, keepdim=True) * scaling_factor
    mask = torch.zeros_like(logits).scatter(1, chosen, 1).bool()
    return torch.zeros_like(logits).scatter(1, chosen, gates), mask, mask.sum(0)


class Layer(torch.nn.Module):
    """A decoder layer whose router gets the logits as they are."""

    def __init__(self, number, score_function="sigmoid"):
        super().__init__()
        self.layer_number, self.mlp = number, torch.nn.Module()
        self.mlp.router = torch.nn.Module()
        config = SimpleNamespace(num_moe_experts=E, num_layers=LAYERS + 1)
        self.mlp.router.score_function, self.mlp.router.topk, self.mlp.router.config = score_function, K, config
        self.select = replay_experts(select_upstream)

    def forward(self, logits, bias, packed_seq_params=None):
        return self.select(logits, K, expert_bias=bias, num_groups=4, group_topk=2, scaling_factor=2.5)


@pytest.fixture
def model():
    layers = torch.nn.ModuleList(Layer(number) for number in (2, 3))
    return layers, RoutingReplay([layers])


def logits_of(layer, tokens=6):
    return torch.randn(tokens, E, generator=torch.Generator().manual_seed(layer))


def forward(layers, ids=IDS, mask=MASK, logits=logits_of, bias=0.0):
    _, params = note_samples(preprocess)(ids, mask)
    return [layer(logits(at), torch.full((E,), bias), packed_seq_params=params) for at, layer in enumerate(layers)]


def test_recorded_experts_are_selected_with_the_gates_of_the_routers_own_scores(model):
    layers, replay = model
    with replay.recording():
        recorded = forward(layers)
    other = [logits_of(at + 10).requires_grad_() for at in range(LAYERS)]
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
    equal = sum(
        int(mask[real].gather(1, indices[real]).sum()) for (_, mask, _), indices in zip(recorded, own, strict=True)
    )
    size = LAYERS * 5 * K + 5
    assert counts == {"equal": equal, "of": 5 * K * LAYERS, "bytes": size, "control": None} and equal < counts["of"]
    assert replay.samples == {} and context().routing is None


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


def first_halves(ids, mask, pre_process=True):
    """A context-parallel rank's part: of each sequence the first half of its tokens."""
    rows = [row[keep][: (int(keep.sum()) + 1) // 2] for row, keep in zip(ids, mask, strict=True)]
    return torch.cat(rows)[None], SimpleNamespace()


def test_a_context_parallel_rank_records_and_replays_its_own_part(model):
    layers, replay = model
    _, params = note_samples(first_halves)(IDS, MASK)
    assert not vars(params)  # no pass
    passes = []
    for context_of_pass, seed in ((replay.recording, 0), (replay.replaying, 10)):
        with context_of_pass():
            _, params = note_samples(first_halves)(IDS, MASK)
            bias = torch.zeros(E)
            passes.append(
                [layer(logits_of(at + seed, 3), bias, packed_seq_params=params)[1] for at, layer in enumerate(layers)]
            )
    assert all(torch.equal(*masks) for masks in zip(*passes, strict=True))
    assert [sample.known.tolist() for sample in replay.samples.values()] == [[True, True, False], [True, False]]


def test_the_rollouts_experts_leave_the_last_token_to_the_router(model):
    layers, replay = model
    column = torch.zeros(2, 4, LAYERS * K, dtype=torch.uint8)
    column[MASK] = torch.arange(5)[:, None].byte() % 4 + torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    batch = {"input_ids": IDS, "attention_mask": MASK.long(), EXPERTS: column}
    replay.take_column(batch)
    assert EXPERTS not in batch
    with replay.replaying():
        first, second = (mask for _, mask, _ in forward(layers))
    own = [select_upstream(logits_of(at), K, torch.zeros(E), scaling_factor=1.0)[1] for at in range(LAYERS)]
    for token, value in ((0, 0), (1, 1), (4, 3)):
        assert first[token].nonzero().flatten().tolist() == [value, value + 1]
        assert second[token].nonzero().flatten().tolist() == [value + 2, value + 3]
    for token in (2, 5):
        assert first[token].equal(own[0][token]) and second[token].equal(own[1][token])
    assert replay.end_step()["of"] == 3 * K * LAYERS


def test_a_pipeline_stage_keeps_the_rollouts_experts_of_its_own_layers():
    stage = RoutingReplay([torch.nn.ModuleList([Layer(3)])])
    experts = torch.arange(4, dtype=torch.uint8).expand(2, 4, LAYERS * K).clone()
    stage.add(IDS, MASK, experts)
    assert [sample.experts.unique().tolist() for sample in stage.samples.values()] == [[2, 3]] * 2
    assert [sample.known.tolist() for sample in stage.samples.values()] == [[True, True, False], [True, False]]
    dense = RoutingReplay([torch.nn.ModuleList([torch.nn.Linear(1, 1)])])
    dense.add(IDS, MASK, experts)
    assert dense.samples == {} and dense.end_step()["of"] == 0


def test_outside_a_pass_and_in_another_model_nothing_is_replayed(model):
    layers, replay = model
    assert forward(layers)[0][1].equal(select_upstream(logits_of(0), K, torch.zeros(E), scaling_factor=1.0)[1])
    with replay.recording():
        forward(layers)
    assert len(replay.samples) == 2 and "recipe_micro_batch" not in vars(note_samples(preprocess)(IDS, MASK)[1])


@pytest.mark.parametrize("fault", ["unknown sample", "outside", "shares", "layer", "by position"])
def test_what_cannot_be_replayed_is_refused(model, fault, monkeypatch):
    layers, replay = model
    with replay.recording():
        forward(layers)
    calls = {
        "unknown sample": (lambda: forward(layers, IDS + 1), "2 of 2 samples .* 2 samples have; expected the samples"),
        "outside": (lambda: layers[0].select(logits_of(0), K, expert_bias=0.0), "outside its layer, .* whole layers"),
        "shares": (lambda: forward(layers, logits=lambda at: logits_of(at, 4)), "4 tokens of a micro batch of 6"),
        "layer": (lambda: layers[0](logits_of(0), 0.0), "layer 2 .* without the micro batch of row update.routing_sam"),
        "by position": (lambda: replay_experts(select_upstream)(logits_of(0), K, 0.0), "1 options by position"),
    }
    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_group", lambda: group, raising=False)
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_rank", lambda: 0, raising=False)
    call, words = calls[fault]
    with replay.replaying(), pytest.raises(RecipeError, match=words):
        call()
    assert context().routing is None


def test_a_layer_that_did_not_record_is_named(model):
    layers, replay = model
    with pytest.raises(RecipeError, match=r"layers \[3\] of a micro batch did not select"), replay.recording():
        forward(layers[:1])
    with pytest.raises(ConfigError, match="layer 2 scores experts by softmax"):
        RoutingReplay([torch.nn.ModuleList([Layer(2, "softmax")])])


class Actor:
    """verl's: its log-probs say whether the pass was replayed."""

    def compute_log_prob(self, data, calculate_entropy):
        return torch.full((2, 2), -1.0 if context().routing is None else -2.0), calculate_entropy


def test_every_second_pass_is_compared_with_one_without_replay(model, monkeypatch):
    from verl_patches.worker import routing_replay

    monkeypatch.setattr(routing_replay, "is_metrics_rank", lambda: True)
    tensors = {"attention_mask": MASK, "rollout_log_probs": torch.full((2, 2), -2.5)}
    data, actor, found = SimpleNamespace(batch=tensors, meta_info={}), Actor(), []
    for _ in range(3):
        with model[1].replaying_log_probs(actor, 2):
            assert actor.compute_log_prob(data, calculate_entropy=True)[0].eq(-2.0).all()
        assert vars(actor) == {}
        found.append(replay_of_step([{**model[1].end_step(), "of": 4, "equal": 3}, None]))
    assert [step["agreement"] for step in found] == [0.75] * 3 and found[1]["logprob_delta_without"] is None
    assert [step["logprob_delta_without"]["mean"] for step in (found[0], found[2])] == [1.5, 1.5]
    step = {"step": 1, "reward": 0.0, "grad_norm": None, "logprob_delta": None, "seconds": {}, "sync": None}
    text = line({**step, "skipped": None, "memory": None, "dispatch": None, "routing_replay": found[0]}, REPLAY_COLUMNS)
    assert text.split()[-2:] == ["0.75000", "1.50e+00"]
    assert replay_of_step([None]) is None and replay_of_step([model[1].end_step()]) is None


def test_places_of_packed_tokens():
    batch = MicroBatch(IDS, MASK, preprocess)
    row, place = batch.places
    assert row.tolist() == [0, 0, 0, -1, 1, 1] and place.tolist() == [0, 1, 2, -1, 0, 1]
    same = MicroBatch(torch.tensor([[8, 9]]), torch.ones(1, 2).bool(), preprocess)
    assert same.keys == batch.keys[1:] and batch.keys[0] != batch.keys[1]
