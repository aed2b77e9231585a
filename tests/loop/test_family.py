"""Test tiny models of DeepSeek-V3's family, Moonlight and Kimi-K2, in the loop; tests/model compares transformers."""

import pytest
from loop_runs import VERIFY, assert_weights_arrive, resume_overrides

from tests.near_ties import norm_tolerance

pytestmark = pytest.mark.slow
MODELS = {name: f"recipe.model_shape=model/{name}_tiny.json" for name in ("moonlight", "kimi_k2")}
STEPS = ("--steps", "2", VERIFY, "trainer.save_freq=1")
ASCEND = ("graphs=true", "graph_batch_sizes=[8]", "chunked_prefill_for_mla=true")
# on Atlas A3 MC2 takes a hidden size of 7168 alone, Kimi-K2's and not Moonlight's
ROLLOUTS = {"moonlight": ("rollout=tp2", "recipe.rollout.enable_expert_parallel=false"), "kimi_k2": ("rollout=tp2dp2",)}
GRAPHS = ("layout=tp2ep2", *(f"recipe.rollout.ascend.{option}" for option in ASCEND))


@pytest.fixture(params=["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def start(request):
    """Return the runs of a line."""
    return request.getfixturevalue("smoke" if request.param == "pypi" else "a3")


@pytest.fixture
def trained(smoke):
    """Return trained(name) -> two steps of GRPO on line pypi, at TP2 EP2."""
    return lambda name: smoke(MODELS[name], "layout=tp2ep2", *STEPS)


def assert_equal_norms(run, expected):
    """Assert equal gradient norms in the last steps of `expected`, which are all of the run's."""
    for step, other in zip(run.steps[::-1], expected.steps[::-1], strict=False):
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=norm_tolerance(step["step"], 1e-5))


def test_moonlight_trains_on_line_pypi(trained):
    assert_weights_arrive(trained("moonlight"), verified=True)


@pytest.mark.upstream
@pytest.mark.parametrize("name", ["moonlight", pytest.param("kimi_k2", marks=pytest.mark.nightly)])
def test_a_line_with_mindspeed_trains_alike(trained, a3, name):
    """Compare TP2, where MindSpeed-LLM's own attention computes another model if the query is not compressed."""
    run = a3(MODELS[name], "layout=tp2", *STEPS)
    assert_weights_arrive(run, verified=True)
    assert_equal_norms(run, trained(name))


@pytest.mark.upstream
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_an_npu_sample_from_the_trained_model(a3, name):
    run = a3("--emulate-npu", MODELS[name], *ROLLOUTS[name], *GRAPHS, *STEPS)
    assert_weights_arrive(run, verified=True)
    reached = run.summary["emulated"]
    assert reached["graphs"] and ("npu_moe_distribute_dispatch" in reached["functions"]) == (name == "kimi_k2")


@pytest.mark.upstream
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_emulated_devices_train_alike(trained, a3, name):
    assert_equal_norms(a3("--emulate-npu", MODELS[name], *ROLLOUTS[name], *GRAPHS, *STEPS), trained(name))


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_another_layout_resumes_with_the_same_gradient(start, name):
    whole = start(MODELS[name], "layout=tp2ep2", *STEPS)
    resumed = start(MODELS[name], "--replay-rollout", str(whole.folder), *STEPS, *resume_overrides(whole, 1))
    assert [step["step"] for step in resumed.steps] == [2]
    assert_equal_norms(resumed, whole)


@pytest.mark.upstream
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_both_lines_fit_the_same_responses_alike(smoke, a3, name):
    run, other = (start(MODELS[name], "--steps", "2", "algo=sft", "layout=tp2ep2") for start in (smoke, a3))
    assert run.steps[0]["objective"]["loss"] == pytest.approx(other.steps[0]["objective"]["loss"], rel=1e-5)
    assert run.steps[0]["objective"]["loss"] > run.steps[1]["objective"]["loss"] > 0
    assert_equal_norms(run, other)
