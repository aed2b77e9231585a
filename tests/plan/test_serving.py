"""Test the checks of one rollout instance, for generate, chat and eval."""

import pytest

from tests.runs import composed
from verl_patches.catalog import platform_rows
from verl_patches.errors import ConfigError
from verl_patches.plan.expected import group_bytes
from verl_patches.plan.memory_plan import run_memory
from verl_patches.plan.serving import instance_checks, instance_config
from verl_patches.run.compose import compose_config
from verl_patches.run.resolve import LayoutError, change_config, resolve

BIG, TINY = "deepseekv3_256die_true_weight", "deepseekv3_tiny_cpu"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def instance(config):
    return resolve(instance_config(config), platform_rows(config.recipe.platform))


def faults(*overrides):
    checks = instance_checks(instance(compose_config(BIG, overrides)))
    return [f"{check.name}: {check.detail}" for check in checks if not check.ok]


def test_a_node_of_16_dies_does_not_hold_671b_and_four_do():
    (fault,) = faults("recipe.rollout.data_parallel_size=8")
    assert "memory: modelled: a die needs 103.75 GB of vLLM's 46.12" in fault
    assert "raise recipe.rollout.data_parallel_size" in fault
    assert faults("recipe.rollout.data_parallel_size=32") == []
    with pytest.raises(LayoutError, match="expected all 256"):  # of which no run on all dies has a layout
        composed(BIG, ["recipe.rollout.data_parallel_size=32"])


def test_weights_are_those_of_the_runs_own_plan_with_the_kv_of_one_response():
    run, one = composed(BIG), instance(compose_config(BIG))
    planned = group_bytes(run_memory(run).setting, 255)["rollout_weights"]
    *_, memory = instance_checks(one)
    longest = (1024 + 3072) * (512 + 64) * 2 * 61
    assert f"needs {(planned + longest) / 1e9:.2f} GB" in memory.detail


def test_an_instance_has_whole_nodes_and_the_rollout_of_any_run():
    sizes = ["trainer.n_gpus_per_node=4", f"{TP}=2", "recipe.rollout.data_parallel_size=4", "trainer.nnodes=4"]
    config = compose_config(TINY, [*sizes, "recipe.rollout.enable_expert_parallel=true", "algo=sft"])
    one = instance(config)
    assert (one.verl.trainer.nnodes, one.verl.trainer.n_gpus_per_node, one.world_size) == (2, 4, 8)
    assert one.rollout.edp == 1 and one.samples and config.trainer.nnodes == 4
    with pytest.raises(ConfigError, match=r"has 8 ranks .*n_gpus_per_node=3"):
        instance(change_config(config, {"trainer.n_gpus_per_node": 3}))
    assert any("MC2" in fault for fault in faults("recipe.rollout.data_parallel_size=24"))
    (streams, _) = faults("recipe.rollout={enable_expert_parallel: false, data_parallel_size: 1}")
    assert "multistream_moe is true with experts cut over 2 TP ranks" in streams  # what rollout/checks.py says of runs
