"""Run in a fresh process: learn where vLLM's real DeepSeek-V3 puts each HF tensor, rank by rank, and try the map.

argv[1]: JSON list of cases as tests/layout/build_vllm.py takes them, with `ruin`: null or one of RUINS, and `planned`.
Prints one JSON line per case and rank:
    case, rank, unmapped, mapped, constants
    touched       parameters that learning changed
    differ        parameters in which load_weights and writes through the map differ; or why load_weights itself fails
    turned        the same with one expert turned, then the parameter that it is in
    covers, plan  what the two checks raise, or null
Groups are formed by vLLM under torch's fake process group, as in build_vllm.py, whose helpers are used.
"""

import contextlib
import json
import sys
from pathlib import Path

CASES = json.loads(sys.argv[1])
sys.argv[1] = "[]"  # build_vllm.py runs its own cases when it is imported: none
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "layout"))

import build_vllm  # noqa: E402  applies vLLM's stand-ins
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.fused_moe import FusedMoE  # noqa: E402
from vllm.model_executor.models import utils as model_utils  # noqa: E402
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM  # noqa: E402

from verl_patches.errors import ConfigError, RecipeError  # noqa: E402
from verl_patches.layout.inventory import build_inventory  # noqa: E402
from verl_patches.layout.parallel import rollout_layout  # noqa: E402
from verl_patches.reshard.destination import learn_destinations  # noqa: E402


@contextlib.contextmanager
def model_of(case: dict, rank: int):
    """vLLM's model of one rank, with random weights."""
    world_size = case["instances"] * case["dp"] * case["pp"] * case["tp"]
    config = build_vllm.engine_config(case, rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with set_current_vllm_config(config):
        parallel_state._WORLD = parallel_state.init_world_group(list(range(world_size)), 0, "fake")
        parallel_state.initialize_model_parallel(case["tp"], case["pp"], "fake")
        torch.set_default_dtype(torch.bfloat16)
        model = DeepseekV3ForCausalLM(vllm_config=config)
        torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            parameter.data.normal_()
        model_utils._model_to_pp_missing_layer_names.clear()  # by id(model), and ids come again in this process
        yield model
    parallel_state.destroy_model_parallel()
    parallel_state._WORLD = None
    dist.destroy_process_group()


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
    with model_of(case, rank) as model:
        before = values(model)
        found = learn_destinations(model, inventory, rank=rank)
        return {"rank": rank, "touched": differing(model, before), **compare(found, model, inventory),
                "covers": error_of(found.check_covers, model), "plan": plan_error(found, inventory, case),
                "unmapped": found.unmapped, "mapped": len(found.tensors),
                "constants": [[c.value, list(c.target.shape)] for c in found.constants]}


def compare(found, model, inventory) -> dict:
    tensors = dict(hf_tensors(inventory))
    try:
        model.load_weights(tensors.items())
    except RuntimeError as error:
        return {"differ": [str(error)]}
    loaded = values(model)
    return {"differ": write_through(found, model, tensors, loaded),
            "turned": turned_expert(found, model, tensors, loaded)}


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


weight_loader = FusedMoE.weight_loader
for number, case in enumerate(CASES):
    FusedMoE.weight_loader = ruined(weight_loader, RUINS[case["ruin"]]) if case["ruin"] else weight_loader
    for rank in case["ranks"]:
        print(json.dumps({"case": number, **run_rank(case, rank)}), flush=True)
