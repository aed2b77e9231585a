"""Test the kinds of model that a user can name, the settings that apply, and refusals before an engine starts."""

import json
import shutil

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.runs import composed
from tests.weights.cases import read_folder, write_checkpoint
from verl_patches.__main__ import app
from verl_patches.catalog import platform_rows
from verl_patches.cli import inference
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import SCORE
from verl_patches.run.engine_options import ROLLOUT_KEY
from verl_patches.spec import Trees
from verl_patches.tools.inference import model, scores
from verl_patches.tools.inference.model import find_model, validation_sampling
from verl_patches.weights.manifest import MANIFEST
from verl_patches.weights.run_folders import take_start
from verl_patches.weights.source import open_source

CONFIG = "deepseekv3_tiny_cpu"


@pytest.fixture
def run(tmp_path, tiny_model):
    """Make the second start of a run, with two checkpoints in its chain, one of them of the first start."""
    home = tmp_path / "outputs" / "mine"
    first, folder = (home / take_start([home], parent, None) for parent in (None, ("0001", 1)))
    given = [f"recipe.output_root={tmp_path}/outputs", "recipe.run=mine", "data.max_response_length=9"]
    OmegaConf.save(composed(CONFIG, given).verl, folder / "config.yaml")
    for start, step in ((first, 1), (folder, 20), (first, 30)):
        saved = start / "checkpoints" / f"global_step_{step}"
        config = json.loads((tiny_model / "config.json").read_text())
        write_checkpoint(saved, read_folder(tiny_model), config, {"step": step})
    shutil.copytree(saved, folder / "checkpoints/global_step_40")  # a save that was killed
    (folder / "checkpoints/global_step_40/manifest.json").unlink()
    return folder


def find(given, root, *overrides, config=None, **which):
    return find_model(given, root, config, overrides, Trees(), platform_rows, **which)


def test_a_run_has_its_own_checkpoints_and_settings_and_other_weights_those_of_a_file(run, tiny_model):
    root = run.parents[1]
    for given in (run, run.relative_to(root), run.parent, run.parent.relative_to(root)):
        model = find(given, root)
        assert list(model.sources) == [1, 20] and model.run.verl.data.max_response_length == 9
    assert list(find(run, root, newest=True).sources) == [20]
    saved = find(run / "checkpoints" / "global_step_20", root, "data.max_response_length=5")
    assert (list(saved.sources), saved.run.verl.data.max_response_length, saved.run.recipe.run) == ([20], 5, "mine")
    other = find(tiny_model, root, "data.max_response_length=7")
    assert list(other.sources) == [0] and other.run.verl.data.max_response_length == 7
    assert other.length == json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]


def test_a_model_may_lie_directly_below_the_root_folder(run, tiny_model):
    class Top(type(tiny_model)):
        def absolute(self):
            return type(tiny_model)("/model")

    assert list(find(Top(tiny_model), run.parents[1]).sources) == [0]


def test_which_settings_count_is_said_and_a_file_of_them_is_refused_for_a_run(run, tiny_model):
    saved = run / "checkpoints" / "global_step_20"
    copied = shutil.copytree(saved, run.parent / "global_step_20")
    found = [find(given, run.parents[1]).settings for given in (run, saved, copied, tiny_model)]
    assert found == [str(run / "config.yaml")] * 2 + [f"configs/{CONFIG}.yaml"] * 2
    for given in (run, saved):
        with pytest.raises(ConfigError, match=r"mine/0002/config.yaml; remove --config-name"):
            find(given, run.parents[1], config=CONFIG)


def test_what_others_follow_takes_effect_in_a_run_too(run, monkeypatch):
    def rollout(*overrides):
        return find(run, run.parents[1], *overrides).run.verl.actor_rollout_ref.rollout

    assert rollout("recipe.dtype=bf16", "actor_rollout_ref.rollout.dtype=bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="rollout.dtype: expected bfloat16"):
        rollout("recipe.dtype=bf16")
    recorded = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(recorded.replace("recipe:\n", "recipe:\n  gone: 1\n", 1))
    with pytest.raises(ConfigError, match="recipe.gone"):
        rollout()
    (run / "config.yaml").write_text(recorded)
    for name in ("require_trees", "refuse_modified"):  # of line a3
        monkeypatch.setattr(model, name, lambda *given: None)
    monkeypatch.setattr(model, "require_platform", lambda *given: None)
    given = [f"recipe.output_root={run.parents[1]}", "recipe.platform=npu_emulated", "recipe.line=a3"]
    OmegaConf.save(composed(CONFIG, [*given, "recipe.run=mine"]).verl, run / "config.yaml")
    assert (rollout().enforce_eager, rollout("recipe.rollout.ascend.graphs=true").enforce_eager) == (True, False)
    with pytest.raises(ConfigError, match=r"expected .*recipe.rollout.ascend"):
        rollout(f"{ROLLOUT_KEY}.enforce_eager=false")
    assert rollout(f"{ROLLOUT_KEY}.engine_kwargs.vllm.max_num_seqs=3").engine_kwargs.vllm.max_num_seqs == 3


def test_a_command_on_a_cpu_starts_again_without_warnings_of_what_a_cpu_lacks(run, monkeypatch):
    started = []
    monkeypatch.setattr(model.os, "execve", lambda *given: started.append(given[2]))
    spec = find(run, run.parents[1]).run
    model.restart_in_environment(spec)
    assert started[0]["VLLM_LOGGING_LEVEL"] == "ERROR"
    for name, value in started[0].items():
        monkeypatch.setenv(name, value)
    model.restart_in_environment(spec)
    assert len(started) == 1  # the second process goes on


@pytest.mark.parametrize("rewards", ["{name: reward_model,path: x}", ""])
def test_eval_is_refused_where_no_part_of_the_reward_is_left(run, tiny_model, tmp_path, monkeypatch, rewards):
    model = find(tiny_model, run.parents[1], f"recipe.rewards=[{rewards}]")
    monkeypatch.setattr(inference, "_prepare_model", lambda *_: model)
    done = CliRunner().invoke(app, ["eval", str(tiny_model), str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError) and "expected a part that eval can run" in str(done.exception)
    assert not (tmp_path / "out").exists()
    both = find(tiny_model, run.parents[1], "recipe.rewards=[{name: reward_model,path: x},{name: maths}]")
    assert scores.unused_models(both.run) == ["reward_model"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.max_respnse_length=5",), "max_respnse_length"),
        (("recipe.platform=npu",), "torch_npu is not installed"),
        (("recipe.rollout.data_parallel_size=3", "trainer.n_gpus_per_node=2"), "3 ranks .* whole nodes"),
    ],
)
def test_overrides_of_a_run_are_of_keys_that_it_has_and_platforms_that_can_run(run, overrides, words):
    with pytest.raises(ConfigError, match=words):
        find(run, run.parents[1], *overrides)


def test_weights_that_the_dies_of_an_instance_do_not_hold_are_refused_before_one_is_started(run, monkeypatch):
    for name in ("require_platform", "refuse_modified"):
        monkeypatch.setattr(model, name, lambda *given: None)
    npu = ("recipe.line=a3", "recipe.platform=npu", "trainer.device=npu", "recipe.train.distributed_timeout_minutes=18")
    share = "actor_rollout_ref.rollout.gpu_memory_utilization="
    assert list(find(run, run.parents[1], *npu, f"{share}0.5", newest=True).sources) == [20]
    with pytest.raises(ConfigError, match=r"memory: modelled: a die needs 0.00 GB .*raise recipe.rollout.data_par"):
        find(run, run.parents[1], *npu, f"{share}1e-6")


def test_what_is_no_model_is_refused_in_one_sentence(run, tiny_model, tmp_path):
    root = run.parents[1]
    with pytest.raises(ConfigError, match="or a folder of weights, with config.json, found no such folder"):
        find(tmp_path / "nothing", root)
    with pytest.raises(ConfigError, match="global_step_40: no manifest.json, so this checkpoint is not complete"):
        find(run / "checkpoints/global_step_40", root)
    (run / "checkpoints/global_step_20" / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match=r"global_step_20/manifest.json"):
        find(run, root)
    for start in run.parent.glob("0*"):
        shutil.rmtree(start / "checkpoints")
    with pytest.raises(ConfigError, match=r"expected complete checkpoints of .* found none.*save_freq"):
        find(run, root)


def test_a_value_model_is_refused(run, tiny_model, monkeypatch):
    def with_a_head(folder):
        source = open_source(folder)
        source.tensors[SCORE] = source.tensors.pop("lm_head.weight")
        return source

    monkeypatch.setattr(model, "open_source", with_a_head)
    with pytest.raises(ConfigError, match="found a value model"):
        find(tiny_model, run.parents[1])


def test_a_validation_is_greedy_unless_the_run_samples():
    val = "actor_rollout_ref.rollout.val_kwargs"
    greedy = validation_sampling(composed(CONFIG))
    assert greedy == {"n": 1, "seed": 0, "max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
    sampled = validation_sampling(composed(CONFIG, [f"{val}.do_sample=true", f"{val}.n=4", f"{val}.top_p=0.5"]))
    assert (sampled["n"], sampled["top_p"], sampled["top_k"], sampled["temperature"]) == (4, 0.5, -1, 0)


@pytest.mark.parametrize("words", [["generate", "x", "in.jsonl", "out.jsonl"], ["chat", "x"], ["eval", "x", "out"]])
def test_commands_refuse_an_unknown_model_and_write_nothing(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError) and "x" in str(done.exception) and list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(app, words[:1]).exit_code == 2
    assert words[0] == "eval" or CliRunner().invoke(app, [*words, "--seed", "-1"]).exit_code == 2
