"""Test a validation's metrics: pass@k by hand and against all draws, those that the record keeps; and its samples."""

import importlib.util
import itertools

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.utils import tracking

from verl_patches.trainer.validation import add_tensorboard_samples, pass_at_k, read_validation, with_pass_at_k


@pytest.mark.parametrize(("n", "correct"), [(4, 0), (4, 1), (4, 3), (4, 4), (7, 2)])
def test_pass_at_k_is_the_share_of_draws_without_replacement_that_have_a_correct_one(n, correct):
    answers = [1] * correct + [0] * (n - correct)
    for k in range(1, n + 1):
        draws = [max(draw) for draw in itertools.combinations(answers, k)]
        assert pass_at_k(n, correct, k) == pytest.approx(sum(draws) / len(draws))
    assert pass_at_k(n, correct, 1) == pytest.approx(correct / n)


SOURCES, PROMPTS = ["maths"] * 8, ["p"] * 4 + ["q"] * 4
REWARDS = [1, 0, 0, 0, 0, 1, 1, 0]  # 1 of 4 and 2 of 4


def validation_metrics(sources=SOURCES, prompts=PROMPTS, **infos):
    """Return names and values as verl's _validate makes them from the wrapped function's answer."""
    found = with_pass_at_k(process_validation_metrics)(sources, prompts, infos)
    return {
        (source, name, metric): v for source, a in found.items() for name, b in a.items() for metric, v in b.items()
    }


def test_pass_at_k_is_beside_verls_metrics_which_stay_as_they_are():
    found = validation_metrics(reward=REWARDS)
    plain = process_validation_metrics(SOURCES, PROMPTS, {"reward": REWARDS})["maths"]["reward"]
    assert {metric: found["maths", "reward", metric] for metric in plain} == dict(plain)
    values = {k: found["maths", "reward", f"pass@{k}"] for k in (1, 2, 4)}
    assert values == pytest.approx({1: 3 / 8, 2: (1 / 2 + 5 / 6) / 2, 4: 1.0})
    assert found["maths", "reward", "best@4/mean"] < 0.9  # drawn with replacement: 1 - (3/4)^4 and 1 - (1/2)^4
    assert len(found) == len(plain) + 3


def test_pass_at_k_is_of_variables_that_are_0_or_1_and_needs_several_responses():
    found = validation_metrics(reward=[value / 2 for value in REWARDS], acc=[bool(value) for value in REWARDS])
    assert ("maths", "acc", "pass@4") in found and ("maths", "reward", "pass@4") not in found
    assert not [key for key in validation_metrics(SOURCES[:2], ["p", "q"], reward=[1, 0]) if "pass" in key[2]]
    both = validation_metrics(["a"] * 4 + ["b"] * 4, reward=[*REWARDS[:4], 0.5, 1, 1, 0])
    assert ("a", "reward", "pass@2") in both and ("b", "reward", "pass@2") not in both


def test_the_score_is_the_mean_of_the_sources_and_a_step_without_validation_has_none():
    metrics = {"val-core/a/x/acc/mean@4": 0.25, "val-core/a/x/acc/best@4/mean": 0.5, "val-aux/a/x/acc/pass@4": 0.75}
    metrics |= {"val-core/b/reward/mean@4": 0.75, "val-aux/b/reward/mean@4": 9.0, "val-aux/a/x/acc/std@4": 9.0}
    found = read_validation({**metrics, "critic/score/mean": 9.0})
    assert found["score"] == 0.5 and list(found["metrics"]) == [*metrics][:4]
    assert read_validation({"critic/score/mean": 0.5, "val-aux/a/reward/mean@1": 0.5}) is None


def logged_samples(logger, folder, monkeypatch):
    """Return the texts of two samples in TensorBoard, after verl's logger of validation samples has logged them."""
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
    add_tensorboard_samples(logger)
    logger.log(["console", "tensorboard"], [("1 + 1?", "It is 2", 1.0), ("2 + 2?", "5", 0.0)], 3)
    logger.log(["console"], [("not", "written", 0.0)], 4)
    assert [*folder.iterdir()] == [folder / "val"]  # scalars have no other file in their folder
    events = EventAccumulator(str(folder / "val")).Reload()
    tags = events.Tags()["tensors"]
    return [(each.step, each.tensor_proto.string_val[0].decode()) for tag in tags for each in events.Tensors(tag)]


def assert_both_samples_are_there(found):
    ((step, text),) = found
    assert step == 3 and all(part in text for part in ("1 + 1?", "It is 2", "1.0", "2 + 2?", "5", "0.0"))


def test_validation_samples_are_in_tensorboard(tmp_path, monkeypatch):
    assert_both_samples_are_there(logged_samples(tracking.ValidationGenerationsLogger(), tmp_path, monkeypatch))


@pytest.mark.upstream
def test_validation_samples_are_in_tensorboard_on_line_a3_whose_verl_has_none_there(a3_sources, tmp_path, monkeypatch):
    (folder,) = a3_sources("verl")
    spec = importlib.util.spec_from_file_location("a3_tracking", folder / "verl/utils/tracking.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    assert_both_samples_are_there(logged_samples(module.ValidationGenerationsLogger(), tmp_path, monkeypatch))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "control"))
    module.ValidationGenerationsLogger().log(["tensorboard"], [("a", "b", 0.0)], 5)  # verl's alone writes nothing
    assert not (tmp_path / "control").exists()
