"""The destination map on a small model without vLLM; with vLLM itself: test_destination_vllm.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl_patches.errors import RecipeError
from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.reshard import destination
from verl_patches.reshard.destination import learn_destinations
from verl_patches.reshard.region import Region

HIDDEN, WIDTH, EXPERTS, WORDS = 6, 4, 3, 10
SHAPES = {
    "embed": (WORDS, HIDDEN), "norm": (HIDDEN,), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH), "bias": (EXPERTS,),
    **{f"expert.{e}.{piece}": shape for e in range(EXPERTS)
       for piece, shape in (("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)))},
}  # fmt: skip

DTYPES = {"bias": "float32"}  # the others: bf16
INVENTORY = Inventory(
    None, tuple(Parameter(name, name, "norm", shape, DTYPES.get(name, "bfloat16")) for name, shape in SHAPES.items()),
    (), (),
)  # fmt: skip


class Toy(nn.Module):
    """Loads as vLLM's layers do.

    Rank 1 of TP2 and EP2 with one expert more: half of gate and up fused, columns of down, padded words, a buffer.
    """

    def __init__(self) -> None:
        super().__init__()

        def empty(*shape: int, dtype=torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.rand(shape).to(dtype), requires_grad=False)

        self.embed = empty(6, HIDDEN)
        self.norm = nn.Parameter(torch.rand(HIDDEN).bfloat16())  # needs a gradient, as vLLM's do
        self.gate_up, self.down = empty(WIDTH, HIDDEN), empty(HIDDEN, WIDTH // 2)
        self.w13, self.w2 = empty(2, WIDTH, HIDDEN), empty(2, HIDDEN, WIDTH)
        self.register_buffer("bias", torch.rand(EXPERTS).bfloat16())
        self.register_buffer("table", torch.rand(5))  # computed by the engine, never loaded
        self.to_local = torch.tensor([-1, 0, 1])

    def load_weights(self, weights) -> set[str]:
        """As vLLM's: one pass, in the order given."""
        loaded = set()
        for name, weight in weights:
            loader = "load_" + name.split(".")[-1 if name.startswith("expert") else 0]
            getattr(self, loader, self.load_whole)(name, weight)
            loaded.add(name)
        return loaded

    def load_whole(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).data.copy_(weight)

    def load_embed(self, name: str, weight: torch.Tensor) -> None:
        weight = weight.narrow(0, 6, 4)
        self.embed[:4].data.copy_(weight)
        self.embed[4:].data.fill_(0)

    def load_gate(self, name: str, weight: torch.Tensor) -> None:
        self.gate_up.data.narrow(0, 0, 2).copy_(weight.chunk(2)[1])

    def load_up(self, name: str, weight: torch.Tensor) -> None:
        if name.startswith("expert"):
            local = self.to_local[int(name.split(".")[1])].item()
            if local != -1:
                self.w13.data[local].copy_(weight)
        else:
            self.gate_up.data[2:] = weight[2:]

    def load_down(self, name: str, weight: torch.Tensor) -> None:
        if name.startswith("expert"):
            local = self.to_local[int(name.split(".")[1])].item()
            if local != -1:
                self.w2.data[local].copy_(weight)
        else:
            self.down.data.copy_(weight[:, 2:].contiguous())


def hf_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=generator).to(getattr(torch, p.dtype)) for p in INVENTORY.parameters}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def write(found, tensors: dict[str, torch.Tensor]) -> None:
    """As the resharder writes: regions of the HF tensors into the learnt views."""
    for name, places in found.tensors.items():
        for place in places:
            region = place.region
            place.tensor.copy_(tensors[name].narrow(region.axis, region.start, region.stop - region.start))
    for constant in found.constants:
        constant.target.fill_(constant.value)


def differing(model: nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in values(model).items() if not torch.equal(value, expected[name])]


def loaded_and_written(model: nn.Module, **options) -> list[str]:
    """Parameters in which load_weights and the learnt map differ."""
    found = learn_destinations(model, INVENTORY, rank=1, **options)
    tensors = hf_tensors()
    model.load_weights(tensors.items())
    expected = values(model)
    for live in found.live.values():
        live.tensor.fill_(float("nan"))
    write(found, tensors)
    model.load_weights((name, tensors[name]) for name in found.unmapped)
    return differing(model, expected)


def test_written_through_the_map_is_what_load_weights_writes():
    model = Toy()
    found = learn_destinations(model, INVENTORY, rank=1)
    found.check_covers(model)
    assert found.unmapped == {} and found.opaque == ()
    assert loaded_and_written(model) == []


def test_regions_and_places():
    model = Toy()
    found = learn_destinations(model, INVENTORY, rank=1)
    places = {name: (place.region, place.parameter) for name, (place,) in found.tensors.items()}
    assert places == {
        "embed": (Region("embed", 0, 6, 10), "embed"),
        "norm": (Region("norm", 0, 0, HIDDEN), "norm"),
        "gate": (Region("gate", 0, 2, 4), "gate_up"),
        "up": (Region("up", 0, 2, 4), "gate_up"),
        "down": (Region("down", 1, 2, 4), "down"),
        "bias": (Region("bias", 0, 0, EXPERTS), "bias"),
        **{f"expert.{e}.up": (Region(f"expert.{e}.up", 0, 0, WIDTH), "w13") for e in (1, 2)},
        **{f"expert.{e}.down": (Region(f"expert.{e}.down", 0, 0, HIDDEN), "w2") for e in (1, 2)},
    }
    for name, (place,) in found.tensors.items():
        assert tuple(place.tensor.shape) == place.region.shape_in(SHAPES[name])
    assert [(c.value, tuple(c.target.shape)) for c in found.constants] == [(0, (2, HIDDEN))]
    assert "table" not in found.live


def test_learning_changes_nothing():
    model = Toy()
    expected, pointers = values(model), {n: p.data_ptr() for n, p in model.named_parameters()}
    learn_destinations(model, INVENTORY, rank=1)
    assert differing(model, expected) == []
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers


def test_casts_and_clones_are_followed():
    class Casting(Toy):
        def load_down(self, name, weight):
            super().load_down(name, weight.float().clone())

        def load_norm(self, name, weight):
            self.norm.data.copy_(weight.to("cpu", torch.float32, copy=True))

    model = Casting()
    assert learn_destinations(model, INVENTORY, rank=1).unmapped == {}
    assert loaded_and_written(model) == []


def test_a_transposed_expert_is_written_transposed():
    """Engines may turn experts; what load_weights does is what the map does, through a transposed view."""

    class Turning(Toy):
        def __init__(self):
            super().__init__()
            self.w2 = nn.Parameter(torch.rand(2, WIDTH, HIDDEN).bfloat16(), requires_grad=False)

        def load_down(self, name, weight):
            super().load_down(name, weight.t() if name.startswith("expert") else weight)

    model = Turning()
    assert loaded_and_written(model) == []
    found = learn_destinations(model, INVENTORY, rank=1)
    assert found.tensors["expert.1.down"][0].tensor.shape == (HIDDEN, WIDTH)


@pytest.mark.parametrize("copied", [False, True])
def test_axes_swapped_after_loading(copied):
    """Without load_shapes such an expert is unmapped, with them it is reached through a transposed view."""
    model = Toy()
    turned = model.w13.data.transpose(1, 2)
    model.w13.data = turned.contiguous() if copied else turned
    plain = learn_destinations(model, INVENTORY, rank=1)
    assert list(plain.unmapped) == ["expert.1.up", "expert.2.up"]
    assert "expanded size" in plain.unmapped["expert.1.up"]
    found = learn_destinations(model, INVENTORY, rank=1, load_shapes={"w13": (2, WIDTH, HIDDEN)})
    assert model.w13.shape == (2, HIDDEN, WIDTH)
    found.check_covers(model)
    tensors = hf_tensors()
    write(found, tensors)
    assert torch.equal(model.w13[0].t(), tensors["expert.1.up"])
    with pytest.raises(RecipeError, match=r"rank 1: w13: expected shape \(2, 9, 9\).*found \(2, 6, 4\)"):
        learn_destinations(model, INVENTORY, rank=1, load_shapes={"w13": (2, 9, 9)})


def test_strided_parameters():
    """As padding for ROCm leaves them (vLLM's _maybe_pad_weight)."""
    model = Toy()
    model.w2.data = nn.functional.pad(model.w2.data, (0, 3))[..., :-3]
    learn_destinations(model, INVENTORY, rank=1).check_covers(model)
    assert loaded_and_written(model) == []


class Computing(Toy):
    def load_norm(self, name, weight):
        self.norm.data.copy_(weight + 1)


class Staging(Toy):
    def load_norm(self, name, weight):
        own = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        own.copy_(weight)
        self.norm.data.copy_(own)


class Asking(Toy):
    def load_norm(self, name, weight):
        if weight[0].item() == 12345:
            raise AssertionError("never")
        self.norm.data.copy_(weight)


class Filling(Toy):
    def load_norm(self, name, weight):
        for place in range(HIDDEN):
            self.norm.data[place].fill_(weight[place].item())


class Changing(Toy):
    def load_norm(self, name, weight):
        self.norm.data.copy_(weight)
        self.norm.data.mul_(2)


class Spreading(Toy):
    def load_norm(self, name, weight):
        self.norm.data[:3].copy_(weight[0])
        self.norm.data[3:].copy_(weight[3:])


class Reinterpreting(Toy):
    def load_norm(self, name, weight):
        self.norm.data.view(torch.uint8).copy_(weight.view(torch.uint8))


class Narrowing(Toy):
    def load_bias(self, name, weight):
        self.bias.copy_(weight.to(torch.float16))


@pytest.mark.parametrize(("loader", "name", "reason"), [
    (Computing, "norm", "aten.add.Tensor computes"), (Staging, "norm", "aten.copy_.default changes it"),
    (Asking, "norm", "item"), (Filling, "norm", "item"), (Spreading, "norm", "repeats"),
    (Reinterpreting, "norm", "another dtype"), (Narrowing, "bias", "aten._to_copy.default computes"),
])  # fmt: skip
def test_what_cannot_be_followed_is_left_to_load_weights(loader, name, reason):
    """That tensor only; where it goes is known all the same."""
    model = loader()
    expected = values(model)
    found = learn_destinations(model, INVENTORY, rank=1)
    assert differing(model, expected) == []
    assert list(found.unmapped) == [name] and reason in found.unmapped[name]
    assert name not in found.tensors and len(found.tensors) == 9
    found.check_covers(model)
    assert loaded_and_written(model) == []


def test_a_parameter_changed_after_its_copy_is_seen():
    model = Changing()
    found = learn_destinations(model, INVENTORY, rank=1)
    assert "aten.mul_.Tensor writes it" in found.unmapped["norm"]
    with pytest.raises(RecipeError, match=r"norm: expected each of its 6 .*\[0\] written by norm .* and by norm"):
        found.check_covers(model)


class Twice(Toy):
    def load_up(self, name, weight):
        super().load_up(name, weight)
        if name == "up":
            self.gate_up.data[1:2].copy_(weight[:1])


class Skipping(Toy):
    def load_norm(self, name, weight):
        pass


class Short(Toy):
    def load_down(self, name, weight):
        if name == "down":
            self.down.data[:, :1].copy_(weight[:, 2:3])
        else:
            super().load_down(name, weight)


@pytest.mark.parametrize(("loader", "message"), [
    (Twice, r"rank 1: gate_up: expected each of its 24 .* found \[1, 0\] written by gate\[2:4\] and by up\[0:1\]"),
    (Skipping, "rank 1: norm: expected each of its 6 .* found none written"),
    (Short, r"rank 1: down: expected each of its 12 .* found 6 not written, the first at \[0, 1\]"),
])  # fmt: skip
def test_a_loader_that_does_not_write_everything_once_is_named(loader, message):
    model = loader()
    with pytest.raises(RecipeError, match=message):
        learn_destinations(model, INVENTORY, rank=1).check_covers(model)


def test_a_loader_that_replaces_memory_is_refused_and_undone():
    class Replacing(Toy):
        def load_norm(self, name, weight):
            self.norm.data = weight.clone()

    model = Replacing()
    expected = values(model)
    with pytest.raises(RecipeError, match="rank 1: load_weights gives norm other memory"):
        learn_destinations(model, INVENTORY, rank=1)
    assert differing(model, expected) == []


def test_a_loader_that_always_fails_is_refused():
    class Failing(Toy):
        def load_weights(self, weights):
            raise KeyError("no such parameter")

    with pytest.raises(RecipeError, match="cannot be traced.*no such parameter"):
        learn_destinations(Failing(), INVENTORY, rank=1)


def test_changes_after_the_last_tensor_are_refused():
    class Finishing(Toy):
        def load_weights(self, weights):
            super().load_weights(weights)
            self.w2.data.mul_(2)

    with pytest.raises(RecipeError, match="changes parameters after the last tensor.*mul_"):
        learn_destinations(Finishing(), INVENTORY, rank=1)


def test_a_tensor_copied_onto_itself_is_no_write():
    """As rollout.absorb_mla_again does where the absorbed weights are views of kv_b_proj."""

    class Deriving(Toy):
        def load_weights(self, weights):
            super().load_weights(weights)
            self.w2.data.transpose(0, 1).copy_(self.w2.data.transpose(0, 1))

    model = Deriving()
    learn_destinations(model, INVENTORY, rank=1).check_covers(model)


def test_private_formats_are_left_to_load_weights(monkeypatch):
    """The decision alone: only an NPU has such formats."""
    model = Toy()
    nz = model.w13.untyped_storage().data_ptr()
    monkeypatch.setattr(destination, "private_format", lambda t: 29 if t.untyped_storage().data_ptr() == nz else None)
    found = learn_destinations(model, INVENTORY, rank=1)
    assert found.unmapped == dict.fromkeys(["expert.1.up", "expert.2.up"], "w13 is kept in the private NPU format 29")
    found.check_covers(model)


def test_memory_that_changed_is_noticed():
    model = Toy()
    found = learn_destinations(model, INVENTORY, rank=1)
    assert found.still_valid(model)
    storage = model.w13.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)  # offload and back: the same storage, the same views
    storage.resize_(size)
    model.table = torch.rand(5)  # not a weight
    assert found.still_valid(model)
    kept = model.w13.data
    model.w13.data = kept.clone()
    assert not found.still_valid(model)
    with pytest.raises(RecipeError, match="learn them again"):
        found.check_covers(model)
    model.w13.data = kept
    assert found.still_valid(model)
    model.w2 = nn.Parameter(model.w2.clone())
    assert not found.still_valid(model)
    assert not found.still_valid(Toy())
