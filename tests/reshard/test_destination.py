"""Test the destination map on a small model without vLLM; test_destination_vllm.py uses vLLM itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reshard.cases import write_through
from verl_patches.errors import RecipeError
from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.reshard import destination
from verl_patches.reshard.destination import learn_destinations

HIDDEN, WIDTH, EXPERTS, WORDS = 6, 4, 3, 10
SHAPES = {
    "embed": (WORDS, HIDDEN), "norm": (HIDDEN,), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH), "bias": (EXPERTS,),
    **{f"expert.{e}.{piece}": shape for e in range(EXPERTS)
       for piece, shape in (("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)))},
}  # fmt: skip
DTYPES = {"bias": "float32"}  # the others: bf16
PARAMETERS = [Parameter(n, n, "norm", shape, DTYPES.get(n, "bfloat16")) for n, shape in SHAPES.items()]
INVENTORY = Inventory(None, tuple(PARAMETERS), (), ())


class Toy(nn.Module):
    """Load weights as vLLM's layers do.

    The model is rank 1 of TP2 and EP2 with one expert more: half of gate and up fused, columns of down, padded
    vocabulary, a buffer. `loaders` are functions (model, name, weight) in place of its own, by name of the HF tensor,
    or "expert up", ...
    """

    def __init__(self, loaders=None) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.rand(shape).bfloat16(), requires_grad=False)

        self.embed = empty(6, HIDDEN)
        self.norm = nn.Parameter(torch.rand(HIDDEN).bfloat16())  # needs a gradient, as vLLM's do
        self.gate_up, self.down = empty(WIDTH, HIDDEN), empty(HIDDEN, WIDTH // 2)
        self.w13, self.w2 = empty(2, WIDTH, HIDDEN), empty(2, HIDDEN, WIDTH)
        self.register_buffer("bias", torch.rand(EXPERTS).bfloat16())
        self.register_buffer("table", torch.rand(5))  # computed by the engine, never loaded
        self.loaders = LOADERS | (loaders or {})

    def load_weights(self, weights) -> set[str]:
        """Load in one pass, in the given order, as vLLM."""
        loaded = set()
        for name, weight in weights:
            key = f"expert {name.split('.')[-1]}" if name.startswith("expert") else name
            self.loaders[key](self, name, weight)
            loaded.add(name)
        return loaded


def load_embed(model, name, weight):
    model.embed[:4].data.copy_(weight.narrow(0, 6, 4))
    model.embed[4:].data.fill_(0)


def load_up(model, name, weight):
    model.gate_up.data[2:] = weight[2:]


def load_expert(parameter, transposed=False):
    def load(model, name, weight):
        local = int(name.split(".")[1]) - 1
        if local >= 0:
            getattr(model, parameter).data[local].copy_(weight.t() if transposed else weight)

    return load


LOADERS = {
    "embed": load_embed,
    "norm": lambda model, name, weight: model.norm.data.copy_(weight),
    "gate": lambda model, name, weight: model.gate_up.data.narrow(0, 0, 2).copy_(weight.chunk(2)[1]),
    "up": load_up,
    "down": lambda model, name, weight: model.down.data.copy_(weight[:, 2:].contiguous()),
    "bias": lambda model, name, weight: model.bias.data.copy_(weight),
    "expert up": load_expert("w13"),
    "expert down": load_expert("w2"),
}


def learn(model):
    return learn_destinations(model, INVENTORY, rank=1)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(model: nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in values(model).items() if not torch.equal(value, expected[name])]


def check_map(model: nn.Module):
    """Learn the map and prove it: learning changes nothing, and writes through the map equal load_weights."""
    before = values(model)
    learnt = learn(model)
    assert differing(model, before) == []
    generator = torch.Generator().manual_seed(0)
    hf = {p.name: torch.randn(p.shape, generator=generator).to(getattr(torch, p.dtype)) for p in PARAMETERS}
    model.load_weights(hf.items())
    expected = values(model)
    write_through(learnt, hf)
    assert differing(model, expected) == []
    return learnt


def _load_and_derive(model, name, weight):
    """Copy a tensor onto itself, as post_load does where absorbed weights are views of kv_b_proj."""
    model.norm.data.copy_(weight)
    model.w2.data.transpose(0, 1).copy_(model.w2.data.transpose(0, 1))


@pytest.mark.parametrize("loaders", [
    {"down": lambda m, n, w: m.down.data.copy_(w.float().clone()[:, 2:])},
    {"norm": lambda m, n, w: m.norm.data.copy_(w.to("cpu", torch.float32, copy=True))},
    {"norm": _load_and_derive},
    {"expert up": load_expert("w2", transposed=True), "expert down": load_expert("w13", transposed=True)},
])  # fmt: skip
def test_casts_clones_transposes_and_copies_onto_itself_are_followed(loaders):
    check_map(Toy(loaders))


def _load_by_staging(model, name, weight):
    own = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    own.copy_(weight)
    model.norm.data.copy_(own)


def _load_by_branching(model, name, weight):
    if weight[0].item() == 12345:
        raise AssertionError("never")
    model.norm.data.copy_(weight)


def _load_and_double(model, name, weight):
    model.norm.data.copy_(weight)
    model.norm.data.mul_(2)


def _load_repeated(model, name, weight):
    model.norm.data[:3].copy_(weight[0])
    model.norm.data[3:].copy_(weight[3:])


@pytest.mark.parametrize(("name", "load", "reason"), [
    ("norm", lambda m, n, w: m.norm.data.copy_(w + 1), "aten.add.Tensor computes"),
    ("norm", _load_by_staging, "aten.copy_.default changes this weight"),
    ("norm", _load_by_branching, "item"),
    ("norm", _load_repeated, "repeats"),
    ("norm", lambda m, n, w: m.norm.data.view(torch.uint8).copy_(w.view(torch.uint8)), "another dtype"),
    ("norm", _load_and_double, "aten.mul_.Tensor computes in place"),
    ("bias", lambda m, n, w: m.bias.copy_(w.to(torch.float16)), "aten._to_copy.default computes"),
    ("expert up", lambda m, n, w: m.w13.data[0].copy_(w.t()), "0.up: RuntimeError"),  # axes swapped
])  # fmt: skip
def test_a_tensor_that_cannot_be_followed_is_refused_with_the_reason(name, load, reason):
    model = Toy({name: load})
    expected = values(model)
    with pytest.raises(RecipeError, match=f"rank 1: .*cannot reproduce.*{name.split()[0]}.*{reason}"):
        learn(model)
    assert differing(model, expected) == []


def _load_twice(model, name, weight):
    load_up(model, name, weight)
    model.gate_up.data[1:2].copy_(weight[:1])


@pytest.mark.parametrize(("name", "load", "message"), [
    ("up", _load_twice, r"gate_up: expected each of its 24 .* found \[1, 0\] written by gate\[2:4\] and by up\[0:1\]"),
    ("norm", lambda m, n, w: None, "rank 1: .*: norm: expected each of its 6 .* found 6 not written"),
    ("down", lambda m, n, w: m.down.data[:, :1].copy_(w[:, 2:3]),
     r"rank 1: .*: down: expected each of its 12 .* found 6 not written, the first at \[0, 1\]"),
])  # fmt: skip
def test_a_loader_that_does_not_write_everything_once_is_named(name, load, message):
    model = Toy({name: load})
    with pytest.raises(RecipeError, match=message):
        learn(model)


def _load_by_replacing(model, name, weight):
    model.norm.data = torch.zeros(HIDDEN, dtype=torch.bfloat16)


def _fail_to_load(model, weights):
    raise KeyError("no such parameter")


def _load_and_finish(model, weights):
    Toy.load_weights(model, weights)
    model.w2.data.mul_(2)


@pytest.mark.parametrize(("load_weights", "message"), [
    (None, "rank 1: .*found new memory for norm:"),
    (_fail_to_load, "before the first tensor: .*no such parameter"),
    (_load_and_finish, "after the last tensor: .*mul_"),
])  # fmt: skip
def test_loaders_that_no_sync_can_follow_are_refused_and_undone(load_weights, message, monkeypatch):
    model = Toy({} if load_weights else {"norm": _load_by_replacing})
    if load_weights:
        monkeypatch.setattr(model, "load_weights", lambda weights: load_weights(model, weights))
    expected = values(model)
    with pytest.raises(RecipeError, match=message):
        learn(model)
    assert differing(model, expected) == []


def test_private_formats_are_refused(monkeypatch):
    """Check the decision alone: only an NPU has such formats."""
    model = Toy()
    nz = model.w13.untyped_storage().data_ptr()
    monkeypatch.setattr(destination, "private_format", lambda t: 29 if t.untyped_storage().data_ptr() == nz else None)
    with pytest.raises(RecipeError, match="expert.1.up: w13 is stored in the private NPU format 29"):
        learn(model)


def test_memory_that_changed_is_noticed():
    model = Toy()
    learnt = learn(model)
    storage = model.w13.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)  # offload and back: the same storage, the same views
    storage.resize_(size)
    model.table = torch.rand(5)  # not a weight
    assert learnt.still_valid(model)
    original = model.w13.data
    model.w13.data = original.clone()
    assert not learnt.still_valid(model)
    model.w13.data = original
    assert learnt.still_valid(model)
    model.w2 = nn.Parameter(model.w2.clone())
    assert not learnt.still_valid(model)
    assert not learnt.still_valid(Toy())
