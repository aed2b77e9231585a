"""Test that a configuration of verl alone gets a recipe from the schema, the switches and the user's own keys."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_patches import import_alone
from verl_patches.catalog import platform_rows
from verl_patches.errors import ConfigError
from verl_patches.import_alone import fill_recipe
from verl_patches.launch.ray_cluster import worker_settings
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import parse_switches
from verl_patches.recipe import Recipe, Watch
from verl_patches.spec import run_from_config, write_run
from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "configs/model/deepseekv3_tiny.json"  # verl reads a folder or this file


def make_engine(text):
    switches = parse_switches(text)
    return Engine(platform_rows(switches.platform), switches)


NPU = make_engine("line=a3,platform=npu")
CPU = make_engine("line=pypi,platform=cpu,drift=warn,-memory.ledger")


def bare_config(rollout_dtype="bfloat16", **recipe):
    """Return verl's own configuration as its main has it: closed to new keys, resolved."""
    found = OmegaConf.load(verl_config_dir() / f"{VERL_CONFIG}.yaml")
    found.actor_rollout_ref.rollout.dtype = rollout_dtype
    found.actor_rollout_ref.model.path = str(MODEL)
    found.algorithm.adv_estimator = "grpo"  # verl's default, gae, is refused
    if recipe:
        found.recipe = recipe
    OmegaConf.resolve(found)
    OmegaConf.set_struct(found, True)
    return found


def filled_config(**options):
    result = bare_config(**options)
    write_run(result, fill_recipe(result, CPU).text())
    return result


def test_without_a_recipe_rows_read_defaults_and_no_run_is_recorded():
    result = filled_config()
    decided = {"run": None, "line": "pypi", "platform": "cpu", "patches": ["-memory.ledger"], "drift": "warn"}
    decided |= {"dtype": "bf16", "output_root": str(ROOT / "outputs")}
    decided["watch"] = {**vars(Watch()), "action": "off"}  # only the launcher's driver reads heartbeats
    assert OmegaConf.to_container(result.recipe) == {**OmegaConf.to_container(OmegaConf.structured(Recipe)), **decided}
    run, worker_run = run_from_config(result), run_from_config(result.actor_rollout_ref)
    assert "memory.ledger" not in run.rows and "memory.order" in run.rows and run.train.world_size == 8
    assert (worker_run.recipe, worker_run.rows, worker_run.train) == (run.recipe, run.rows, run.train)


def test_the_users_keys_and_the_rollouts_dtype_replace_the_defaults():
    recipe = filled_config(rollout_dtype="float32", run="named", logprob_check={"action": "report"}).recipe
    assert (recipe.dtype, recipe.run, recipe.logprob_check.action) == ("fp32", "named", "report")
    assert recipe.logprob_check.max_mean_bf16 == Recipe().logprob_check.max_mean_bf16
    with pytest.raises(ConfigError, match="float16"):
        filled_config(rollout_dtype="float16")


# values of keys that only the launcher reads
LAUNCHER_VALUES = {"hccl.base_port": {"base_port": 62000}, "timeouts": {"wall_s": 5}, "ray_address": "auto"}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"line": "a3"}, ["recipe.line is 'a3'", "VERL_PATCHES"]),
        ({"dtype": "fp32"}, ["recipe.dtype", "rollout.dtype"]),
        ({"patches": ["-reshard.direct"]}, ["recipe.patches", "-memory.ledger"]),
        ({"memory": {"ledger": "loud"}}, ["recipe.memory.ledger", "strict"]),
        ({"rollout": {"data_parallel_size": 2}}, ["rollout layout"]),
        ({"train": {"skip_old_log_prob": True}}, ["ppo_mini_batch_size is 256 and data.train_batch_size 1024"]),
        *(
            ({key.split(".")[0]: value}, [f"recipe.{key} is set", "only the launcher"])
            for key, value in LAUNCHER_VALUES.items()
        ),
    ],
)
def test_contradictions_and_unknown_keys_are_refused_by_name(recipe, words):
    with pytest.raises(ConfigError) as refused:
        filled_config(**recipe)
    assert all(word in str(refused.value) for word in words), refused.value


def test_faults_of_layout_and_model_are_refused_as_by_the_launcher():
    """Refuse tp 2 with whole experts on both ranks; on_policy reads other entries of the model's config.json."""
    split = bare_config()
    split.actor_rollout_ref.actor.megatron.tensor_model_parallel_size = 2
    split.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size = 1
    with pytest.raises(ConfigError, match="expert outputs of different tokens"):
        fill_recipe(split, CPU)
    dropout = bare_config(train={"skip_old_log_prob": True})
    OmegaConf.set_struct(dropout, False)
    dropout.actor_rollout_ref.model.override_config.model_config = {"attention_dropout": 0.1}
    with pytest.raises(ConfigError, match="attention_dropout"):
        fill_recipe(dropout, CPU)


@pytest.mark.parametrize(
    ("device", "route", "balanced", "message"),
    [
        ("cuda", "0", False, "trainer.device is cuda; expected npu"),
        ("npu", None, False, "FIX_ROUTE is None"),
        ("npu", "0", True, "FIX_ROUTE is 0 .* expected 1"),
        ("npu", "1", True, None),
    ],
)
def test_on_npu_the_device_and_the_fixed_route_must_match(monkeypatch, device, route, balanced, message):
    monkeypatch.delenv("VLLM_ENABLE_FIX_ROUTE", raising=False)
    if route is not None:
        monkeypatch.setenv("VLLM_ENABLE_FIX_ROUTE", route)
    found = bare_config(rollout={"balanced_routing": balanced})
    found.trainer.device = device
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        fill_recipe(found, NPU)


@pytest.mark.parametrize(
    ("rows", "engine", "nodes", "network"),
    [
        (NPU, True, 16, {"nodes": 16, "interface": "eth1"}),
        (make_engine("line=a3,platform=cpu"), True, 1, None),
        (CPU, False, 1, None),
        (CPU, False, 4, {"nodes": 4, "interface": None}),  # gloo needs an interface on several nodes
    ],
)
def test_workers_are_sent_the_same_settings_as_by_the_launcher(monkeypatch, rows, engine, nodes, network):
    monkeypatch.setenv("VLLM_ENABLE_FIX_ROUTE", "0")
    npu = rows is NPU
    found = bare_config(**({"hccl": {"interface": "eth1"}} if npu else {}))
    found.trainer.nnodes, found.trainer.device = nodes, "npu" if npu else "cuda"
    run = fill_recipe(found, rows)
    section = {**OmegaConf.to_container(found.actor_rollout_ref), "run": run.text()} if engine else None
    assert worker_settings(run) == {"engine": section, "network": network}


@pytest.mark.parametrize("drift", ["warn", "strict"])
def test_edited_sources_are_refused_or_recorded(monkeypatch, caplog, drift):
    """Check that the trainer keeps them for the summary (trainer/run.py); upstream/test_modified.py finds them."""

    def modified(run):
        if run.recipe.drift == "strict":
            raise ConfigError("verl/a.py")
        return {"verl": ["verl/a.py (modified)"]}

    monkeypatch.setattr(import_alone, "refuse_modified", modified)
    monkeypatch.setattr(import_alone, "send_settings", lambda **sent: None)  # Ray does not run
    rows = make_engine(f"line=pypi,platform=cpu,drift={drift}")
    monkeypatch.setattr(import_alone.engine, "current_engine", lambda: rows)
    trainer = SimpleNamespace(init_workers=print)
    start = import_alone.recipe_by_default(lambda *_: None)
    if drift == "strict":
        with pytest.raises(ConfigError, match="verl/a.py"):
            start(trainer, bare_config())
    else:
        start(trainer, bare_config())
        assert trainer.init_workers.func is import_alone.run_unless_start_fails
        assert trainer.modified_sources == {"verl": ["verl/a.py (modified)"]}
        assert "started without its launcher" in caplog.text and "dirty: verl" in caplog.text
