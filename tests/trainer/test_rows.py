"""Each row around verl's trainer and workers has its effect, and the effect is gone when the row is switched off."""

import pytest

from verl_patches.patching.switches import parse

IDS = (
    "update.fit_as_run update.recipe_worker update.log_with_run update.sharding_manager logprob.truth_check "
    "platform.tensordict_cuda platform.pickle_torch_config model.train_dtype model.optimizer_dtype memory.empty_cache"
).split()
# rows that need classes of the others, and have tests of their own with and without them
NEED_THESE = (
    "update.on_policy update.micro_batches_as_planned update.tensor_cache update.skip_bad_steps reshard.direct "
    "memory.swap_optimizer memory.order memory.ledger checkpoint.parts checkpoint.save checkpoint.load"
).split()


@pytest.fixture
def probe(run_ranks):
    env = {"VLLM_USE_V1": "0", "VLLM_NO_USAGE_STATS": "1"}
    return lambda switches: run_ranks("tests.trainer.probe_rows:effects", patches=switches, env=env)[0]


@pytest.mark.slow
def test_rows_have_their_effect(probe):
    assert probe("line=pypi,platform=cpu") == dict.fromkeys(IDS, True)


@pytest.mark.slow
def test_without_the_rows_the_effect_is_gone(probe):
    text = ",".join(["line=pypi,platform=cpu", *(f"-{name}" for name in (*IDS, *NEED_THESE))])
    assert parse(text).text() == text
    assert probe(text) == dict.fromkeys(IDS, False)
