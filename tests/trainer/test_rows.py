"""Test that patches of verl's trainer and workers have their effect, and that it is gone when they are off.

update.fit_as_run and model.train_dtype are left out: without them no run of tests/loop has a record, or is exact in
fp32.
"""

import pytest

from verl_patches.patching.switches import parse_switches

DEFAULT_SWITCHES = "line=pypi,platform=cpu"
IDS = (
    "update.recipe_worker update.recipe_critic update.log_with_run update.sharding_manager "
    "platform.tensordict_cuda platform.pickle_torch_config model.optimizer_dtype memory.empty_cache reward.pass_at_k"
).split()
# rows that need classes of the others, and have tests of their own with and without them
DEPENDENT_IDS = (
    "update.on_policy update.micro_batches_as_planned update.tensor_cache update.skip_bad_steps reshard.direct "
    "memory.order memory.ledger checkpoint.parts checkpoint.save checkpoint.load "
    "update.recipe_by_default update.fit_as_run model.train_dtype update.critic_gradients update.mini_batches "
    "update.sample_weights reward.models"
).split()
SWITCHES_OFF = ",".join([DEFAULT_SWITCHES, *(f"-{name}" for name in (*IDS, *DEPENDENT_IDS))])


@pytest.mark.slow
@pytest.mark.parametrize(("switches", "effect"), [(DEFAULT_SWITCHES, True), (SWITCHES_OFF, False)], ids=["on", "off"])
def test_rows_have_their_effect_and_without_them_it_is_gone(run_ranks, switches, effect):
    assert parse_switches(switches).text() == switches
    env = {"VLLM_USE_V1": "0", "VLLM_NO_USAGE_STATS": "1"}
    found = run_ranks("tests.trainer.probe_rows:effects", patches=switches, env=env)[0]
    assert found == dict.fromkeys(IDS, effect)
