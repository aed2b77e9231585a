"""Learn where vLLM's real DeepSeek-V3 puts each HF tensor, rank by rank in one process, and try the map.

Groups are formed by vLLM under torch's fake process group, as in tests/layout/build_vllm.py, whose helpers are used.
"""

from tests.layout import build_vllm  # applies vLLM's stand-ins

# isort: split
import torch
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.models import utils as model_utils

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import rollout_layout
from verl_patches.reshard.destination import learn_destinations


def ruined(loader, change):
    """A weight_loader that treats expert 0's down projection of the last layer otherwise."""

    def load(self, param, weight, name, shard_id, expert_id):
        if expert_id == 0 and shard_id == "w2" and f".{RUINED_LAYER}." in name:
            return change(lambda weight: loader(self, param, weight, name, shard_id, expert_id), weight)
        return loader(self, param, weight, name, shard_id, expert_id)

    return load


RUINED_LAYER = 3
RUINS = {
    "twice": lambda load, weight: (load(weight), load(weight)),
    "skip": lambda load, weight: None,
    "transpose": lambda load, weight: load(weight.t()),
    "compute": lambda load, weight: load(weight * 2),
}


def values(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differing(model, expected) -> list[str]:
    return [name for name, value in values(model).items() if not torch.equal(value, expected[name])]


def hf_tensors(inventory):
    generator = torch.Generator().manual_seed(0)
    for p in inventory.parameters:
        yield p.name, torch.randn(p.shape, generator=generator).to(getattr(torch, p.dtype))


def error_of(check, *args) -> str | None:
    try:
        check(*args)
    except (RecipeError, ConfigError) as error:
        return str(error)
    return None


def run_rank(case: dict, rank: int) -> dict:
    inventory = build_inventory(case["config"])
    with build_vllm.model_of(case, rank) as model:
        for parameter in model.parameters():
            parameter.data.normal_()
        model_utils._model_to_pp_missing_layer_names.clear()  # by id(model), and ids come again in this process
        before = values(model)
        found = learn_destinations(model, inventory, rank=rank)
        return {
            "rank": rank,
            "touched": differing(model, before),
            **compare(found, model, inventory),
            "covers": error_of(found.check_covers, model),
            "plan": plan_error(found, inventory, case),
            "unmapped": found.unmapped,
            "mapped": len(found.tensors),
            "constants": [[c.value, list(c.target.shape)] for c in found.constants],
        }


def compare(found, model, inventory) -> dict:
    tensors = dict(hf_tensors(inventory))
    try:
        model.load_weights(tensors.items())
    except RuntimeError as error:
        return {"differ": [str(error)]}
    loaded = values(model)
    return {
        "differ": write_through(found, model, tensors, loaded),
        "turned": turned_expert(found, model, tensors, loaded),
    }


def plan_error(found, inventory, case: dict) -> str | None:
    """What check_against_plan says to the case's own layout, with what its `planned` has otherwise."""
    told = {**case, **case["planned"]}

    def check():
        sizes = (told[size] for size in ("instances", "dp", "tp", "pp"))
        layout = rollout_layout(*sizes, expert_parallel=told["expert_parallel"])
        found.check_against_plan(inventory, layout, told.get("library", "vllm"))

    return error_of(check)


def write_through(found, model, tensors, expected) -> list[str]:
    """Parameters that are not as load_weights leaves them when all is written through the map, over NaN."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    for name, places in found.tensors.items():
        for place in places:
            region = place.region
            place.tensor.copy_(tensors[name].narrow(region.axis, region.start, region.stop - region.start))
    for constant in found.constants:
        constant.target.fill_(constant.value)
    model.load_weights((name, tensors[name]) for name in found.unmapped)
    return differing(model, expected)


def turned_expert(found, model, tensors, expected) -> list[str]:
    """The same with a square block of one expert turned: the comparison must see it."""
    place = next((places[0] for name, places in found.tensors.items() if ".experts." in name), None)
    if place is None:
        return []
    side = min(place.tensor.shape)
    block = place.tensor[:side, :side]
    write_through(found, model, tensors, expected)
    block.copy_(block.t().clone())
    return [*differing(model, expected), place.parameter]


def learnt(cases: dict[str, dict]) -> dict[str, list[dict]]:
    """{name: rows}; a case is as build_vllm.py takes it, with `ruin`: None or one of RUINS, and `planned`.

    A row, of a rank: rank, unmapped, mapped, constants
        touched       parameters that learning changed
        differ        parameters in which load_weights and writes through the map differ; or why load_weights fails
        turned        the same with one expert turned, then the parameter that it is in
        covers, plan  what the two checks raise, or None
    """
    weight_loader, found = FusedMoE.weight_loader, {}
    for name, case in cases.items():
        FusedMoE.weight_loader = ruined(weight_loader, RUINS[case["ruin"]]) if case["ruin"] else weight_loader
        found[name] = [run_rank(case, rank) for rank in case["ranks"]]
    return found
