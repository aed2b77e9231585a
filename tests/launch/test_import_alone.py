"""A configuration of verl alone gets the recipe that rows read, from the schema, the switches and what a user adds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_patches.config.recipe import Recipe, recipe_keys
from verl_patches.errors import ConfigError
from verl_patches.launch.import_alone import _record, fill_recipe
from verl_patches.launch.ray_cluster import worker_settings
from verl_patches.patching.contract import installed_root
from verl_patches.patching.switches import parse
from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir

MODEL = Path(__file__).resolve().parents[2] / "configs/model/deepseekv3_tiny.json"  # verl reads a folder or this file
NPU = parse("line=a3,platform=npu")
CPU = parse("line=pypi,platform=cpu,drift=warn,-memory.order")


def config(of_rollout="bfloat16", **recipe):
    """verl's own configuration as its main has it: closed to new keys, resolved."""
    found = OmegaConf.load(verl_config_dir() / f"{VERL_CONFIG}.yaml")
    found.actor_rollout_ref.rollout.dtype = of_rollout
    found.actor_rollout_ref.model.path = str(MODEL)
    if recipe:
        found.recipe = recipe
    OmegaConf.resolve(found)
    OmegaConf.set_struct(found, True)
    return found


def test_without_a_recipe_rows_find_defaults_and_no_run_to_record():
    filled = config()
    fill_recipe(filled, CPU)
    decided = {
        "run": None,
        "line": "pypi",
        "platform": "cpu",
        "patches": ["-memory.order"],
        "drift": "warn",
        "dtype": "bf16",
    }
    assert OmegaConf.to_container(filled.recipe) == {**OmegaConf.to_container(OmegaConf.structured(Recipe)), **decided}
    assert filled.actor_rollout_ref.recipe == filled.recipe and len(filled.recipe) > len(decided)
    assert all(
        OmegaConf.select(filled, key) == item.default for key, item in recipe_keys() if key.startswith("recipe.train.")
    )


def test_the_dtype_is_the_rollouts_and_other_ones_are_refused():
    filled = config("float32")
    fill_recipe(filled, CPU)
    assert filled.recipe.dtype == "fp32"
    with pytest.raises(ConfigError, match="float16"):
        fill_recipe(config("float16"), CPU)


def test_what_a_user_adds_goes_over_the_defaults():
    filled = config(run="mine", logprob_check={"action": "report"})
    fill_recipe(filled, CPU)
    assert filled.recipe.run == "mine" and filled.recipe.logprob_check.action == "report"
    assert filled.recipe.logprob_check.max_mean_bf16 == Recipe().logprob_check.max_mean_bf16


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"line": "a3"}, ["recipe.line is 'a3'", "VERL_PATCHES"]),
        ({"dtype": "fp32"}, ["recipe.dtype", "rollout.dtype"]),
        ({"patches": ["-reshard.direct"]}, ["recipe.patches", "-memory.order"]),
        ({"typo": 1}, ["typo"]),
        ({"memory": {"ledger": "loud"}}, ["recipe.memory.ledger", "strict"]),
        ({"rollout": {"dp": 2}}, ["rollout layout"]),
        ({"tensor_cache": {"enabled": True}, "rollout": {"replay": "x"}}, ["recipe.tensor_cache.enabled"]),
        ({"train": {"skip_old_log_prob": True}}, ["ppo_mini_batch_size is 256 and data.train_batch_size 1024"]),
        ({"rollout_correction": {"rollout_is": "word"}}, ["recipe.rollout_correction.rollout_is is 'word'"]),
        *(
            ({key: value}, [f"recipe.{name} is given", "only the launcher"])
            for key, value, name in (
                ("hccl", {"base_port": 62000}, "hccl.base_port"),
                ("timeouts", {"wall_s": 5}, "timeouts"),
                ("ray_address", "auto", "ray_address"),
                ("ray_port", 6379, "ray_port"),
                ("worker_process_setup_hook", "a.b", "worker_process_setup_hook"),
                ("model_shape", "x", "model_shape"),
            )
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(recipe, said):
    with pytest.raises(ConfigError) as refused:
        fill_recipe(config(**recipe), CPU)
    assert all(word in str(refused.value) for word in said), refused.value


def test_what_the_launcher_refuses_of_a_layout_is_refused_too():
    """tp 2 with whole experts on both ranks; the other entries of the model's config.json are read for on_policy."""
    split = config()
    split.actor_rollout_ref.actor.megatron.tensor_model_parallel_size = 2
    split.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size = 1
    with pytest.raises(ConfigError, match="expert outputs of different tokens"):
        fill_recipe(split, CPU)
    with pytest.raises(ConfigError, match="attention_dropout"):
        dropout = config(train={"skip_old_log_prob": True})
        OmegaConf.set_struct(dropout, False)
        dropout.actor_rollout_ref.model.override_config.model_config = {"attention_dropout": 0.1}
        fill_recipe(dropout, CPU)


@pytest.mark.parametrize(
    ("device", "route", "balanced", "said"),
    [
        ("cuda", "0", False, "trainer.device is cuda; expected npu"),
        ("npu", None, False, "FIX_ROUTE is None"),
        ("npu", "1", False, "FIX_ROUTE is 1 .* expected 0"),
        ("npu", "0", True, "FIX_ROUTE is 0 .* expected 1"),
        ("npu", "0", False, None),
        ("npu", "1", True, None),
    ],
)
def test_on_npu_the_device_and_the_fixed_route_must_agree(monkeypatch, device, route, balanced, said):
    monkeypatch.delenv("VLLM_ENABLE_FIX_ROUTE", raising=False)
    if route is not None:
        monkeypatch.setenv("VLLM_ENABLE_FIX_ROUTE", route)
    found = config(rollout={"balanced_routing": balanced})
    found.trainer.device = device
    if said is None:
        fill_recipe(found, NPU)
    else:
        with pytest.raises(ConfigError, match=said):
            fill_recipe(found, NPU)


def test_the_folder_of_the_record_is_named_in_full(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = OmegaConf.create({"run": "mine", "output_root": "outputs"})
    assert str(tmp_path / "outputs" / "mine") in _record(recipe)
    assert "+recipe.run=NAME" in _record(OmegaConf.merge(recipe, {"run": None}))


@pytest.mark.parametrize(
    ("switches", "engine", "network"),
    [(NPU, True, {"nodes": 16, "interface": "eth1"}), (parse("line=a3,platform=cpu"), True, None), (CPU, False, None)],
)
def test_workers_are_sent_what_the_launcher_would_send(monkeypatch, switches, engine, network):
    monkeypatch.setenv("VLLM_ENABLE_FIX_ROUTE", "0")
    found = config(**({"hccl": {"interface": "eth1"}} if network else {}))
    found.trainer.nnodes, found.trainer.device = 16, "npu" if network else "cuda"
    fill_recipe(found, switches)
    sent = worker_settings(found)
    section = sent["engine"]
    assert sent["network"] == network and (section is not None) is engine
    assert not engine or section == OmegaConf.to_container(found.actor_rollout_ref)


@pytest.mark.slow
def test_edited_sources_are_refused_or_recorded(monkeypatch, tmp_path):
    """verl as the path has it, with one edit; the trainer keeps what differs for the summary (trainer/run.py)."""
    for folder in (installed_root("verl") / "verl", *installed_root("verl").glob("verl-*.dist-info")):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "verl/utils/torch_dtypes.py"
    file.write_text(file.read_text() + "# edited\n")
    code = """
import sys
from types import SimpleNamespace
from verl_patches.launch import import_alone
from verl_patches.patching.switches import parse
from test_import_alone import config
import_alone.send_settings = lambda **sent: None  # no Ray here
for drift in ("warn", "strict"):
    import_alone.engine.current = lambda: SimpleNamespace(switches=parse(f"line=pypi,platform=cpu,drift={drift}"))
    trainer = SimpleNamespace(init_workers=print)
    try:
        import_alone.recipe_by_default(lambda *_: None)(trainer, config())
        assert trainer.init_workers.func is import_alone.unless_start_fails
        print(trainer.modified_sources)
    except ValueError as error:
        print(type(error).__name__, "torch_dtypes.py (modified)" in str(error))
"""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": f"{tmp_path}:{here}:{here.parents[1]}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["{'verl': ['verl/utils/torch_dtypes.py (modified)']}", "ConfigError True"]
    assert "started without its launcher" in done.stderr and "dirty: verl" in done.stderr
