"""How many nodes hold one rollout instance, for generate, chat and eval."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from verl_patches.config.compose import compose, model_shape_of
from verl_patches.errors import ConfigError, require
from verl_patches.layout.parallel import rollout_layout_of, world_size
from verl_patches.planning.expected import group_bytes
from verl_patches.planning.memory_plan import run_memory
from verl_patches.planning.serving import instance_checks, instance_of, serving_plan, serving_text

BIG, TINY = "deepseekv3_256die_true_weight", "deepseekv3_tiny_cpu"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def faults(config):
    return [f"{c.name}: {c.detail}" for c in instance_checks(instance_of(config), model_shape_of(config)) if not c.ok]


def test_a_node_of_16_dies_does_not_hold_671b_and_four_do():
    one, four = (compose(BIG, [f"recipe.rollout.dp={dp}"]) for dp in (8, 32))
    (fault,) = faults(one)
    assert "memory: modelled: a die needs 103.75 GB of vLLM's 52.63" in fault and "4 node(s) of 16 dies" in fault
    assert "recipe.rollout.dp=32" in fault and faults(four) == []
    with pytest.raises(ConfigError, match="103.75 GB"):
        require(instance_checks(instance_of(one), model_shape_of(one)))
    plan = serving_plan(compose(BIG), model_shape_of(compose(BIG)))
    assert (plan["nodes"], plan["dies"], plan["dp"]) == (4, 16, 32) and plan["die_bytes"] <= plan["share_bytes"]
    more = compose(BIG, ["actor_rollout_ref.rollout.gpu_memory_utilization=0.6"])
    assert serving_plan(more, model_shape_of(more))["nodes"] == 8


def test_a_model_that_no_instance_holds_is_said():
    config = compose(BIG, ["actor_rollout_ref.rollout.gpu_memory_utilization=0.2"])
    plan = serving_plan(config, model_shape_of(config))
    assert plan["nodes"] is plan["dp"] is None and "no number of nodes" in serving_text(plan)
    assert "no number of nodes" in faults(config)[0]


def test_weights_are_those_of_the_runs_own_plan_with_the_kv_of_one_response():
    config = compose(BIG)
    planned = group_bytes(run_memory(config, ("reshard.direct",)).setting, 255)["rollout_weights"]
    *_, memory = instance_checks(instance_of(config), model_shape_of(config))
    longest = (1024 + 3072) * (512 + 64) * 2 * 61
    assert f"needs {(planned + longest) / 1e9:.2f} GB" in memory.detail
    wide = replace(model_shape_of(config), num_hidden_layers=6)
    assert instance_checks(instance_of(config), wide)[-1].detail != memory.detail


def test_an_instance_has_whole_nodes_and_the_rollout_of_any_run():
    config = compose(TINY, ["trainer.n_gpus_per_node=4", f"{TP}=2", "recipe.rollout.dp=4", "trainer.nnodes=4"])
    OmegaConf.update(config, "recipe.rollout.expert_parallel", True)
    config.recipe.objective.name = "sft"
    one = instance_of(config)
    assert (one.trainer.nnodes, one.trainer.n_gpus_per_node, world_size(one)) == (2, 4, 8)
    assert rollout_layout_of(one).edp == 1 and one.recipe.objective.name == "rl" and config.trainer.nnodes == 4
    assert world_size(instance_of(compose(TINY))) == 1
    with pytest.raises(ConfigError, match=r"has 8 ranks .*n_gpus_per_node=3"):
        instance_of(OmegaConf.merge(config, {"trainer": {"n_gpus_per_node": 3}}))
    with pytest.raises(ConfigError, match="expert_parallel"):
        instance_of(OmegaConf.merge(config, {"recipe": {"rollout": {"expert_parallel": False}}}))
    mc2 = compose(BIG, ["recipe.rollout.dp=24"])
    assert any("MC2" in fault for fault in faults(mc2))
    small = compose(BIG, ["recipe.rollout.dp=32", "recipe.hccl.buffer_mib=200"])
    assert any("HCCL_BUFFSIZE" in fault for fault in faults(small))
