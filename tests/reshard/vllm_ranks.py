"""Learn where vLLM's real DeepSeek-V3 puts each HF tensor, rank by rank in one process, and test the map.

Groups are formed by vLLM under torch's fake process group, as in tests/layout/build_vllm.py, whose helpers are used.
"""

from tests.layout import build_vllm  # applies vLLM's stand-ins

# isort: split
import torch
from vllm.model_executor.models import utils as model_utils

from tests.reshard.cases import write_through
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import rollout_layout
from verl_patches.layout.sharding import local_parameters
from verl_patches.reshard.destination import learn_destinations
from verl_patches.reshard.region import shard_region


def values(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differing(model, expected) -> list[str]:
    return [name for name, value in values(model).items() if not torch.equal(value, expected[name])]


def hf_tensors(inventory):
    generator = torch.Generator().manual_seed(0)
    for p in inventory.parameters:
        yield p.name, torch.randn(p.shape, generator=generator).to(getattr(torch, p.dtype))


def run_rank(case: dict, rank: int) -> dict:
    inventory, planned = build_inventory(case["config"]), {**case, **case["planned"]}
    layout = rollout_layout(*(planned[size] for size in ("instances", "dp", "tp", "expert_parallel")))
    with build_vllm.rank_model(case, rank) as model:
        for parameter in model.parameters():
            parameter.data.normal_()
        model_utils._model_to_pp_missing_layer_names.clear()  # keyed by id(model), and ids are reused in this process
        before = values(model)
        learnt = learn_destinations(model, inventory, rank=rank)
        shards = local_parameters(inventory, layout, rank, planned.get("library", "vllm")).shards
        shapes = {parameter.name: parameter.shape for parameter in inventory.parameters}
        regions = {name: shard_region(shard).along_axis(0, shapes[name]) for name, shard in shards.items()}
        regions = {name: [region] for name, region in regions.items() if region.rows}
        found = {
            name: [p.region.along_axis(0, shapes[name]) for p in places] for name, places in learnt.tensors.items()
        }
        dtypes = {name: (shards[name].dtype, places[0].tensor.dtype) for name, places in learnt.tensors.items()}
        return {
            "rank": rank,
            "groups": build_vllm.groups(),
            "dtypes": [name for name, (ours, live) in dtypes.items() if f"torch.{ours}" != str(live)],
            "touched": differing(model, before),
            **compare(learnt, model, inventory),
            "plan": sorted(name for name in regions | found if regions.get(name) != found.get(name)),
            "mapped": len(learnt.tensors),
            "constants": [[c.value, list(c.target.shape)] for c in learnt.constants],
        }


def compare(learnt, model, inventory) -> dict:
    """Return parameters that differ between load_weights and the map's writes over NaN; also with a wrong expert."""
    tensors = dict(hf_tensors(inventory))
    model.load_weights(tensors.items())
    expected = values(model)
    write_through(learnt, tensors)
    differ = differing(model, expected)
    for place in [places[0] for name, places in learnt.tensors.items() if ".experts." in name][:1]:
        side = min(place.tensor.shape)
        place.tensor[:side, :side] = place.tensor[:side, :side].t().clone()
    return {"differ": differ, "transposed": differing(model, expected)}


def learn_cases(cases: dict[str, dict]) -> dict[str, list[dict]]:
    """Return {name: rows}; a case is one of build_vllm.py with `planned`, other sizes or another library in the plan.

    A row is a rank's: rank, groups, mapped, constants, and
        dtypes, plan        tensors whose parameter has another dtype, or region, than layout/sharding.py says
        touched             parameters that learning changed
        differ, transposed  see `compare`
    """
    return {name: [run_rank(case, rank) for rank in case["ranks"]] for name, case in cases.items()}
