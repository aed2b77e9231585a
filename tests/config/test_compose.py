import pytest
from omegaconf import OmegaConf

from verl_patches.config.compose import CONFIGS_DIR, compose
from verl_patches.errors import ConfigError
from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir

TINY = "grpo_deepseekv3_tiny_cpu"


def test_verls_config_is_below_ours_and_everything_is_resolved():
    config = compose(TINY, ["data.train_batch_size=8", "recipe.dtype=bf16", "+data.own_key=1"])
    assert config.data.train_batch_size == 8 and config.data.own_key == 1
    assert config.trainer.project_name == "deepseekv3_tiny" and config.algorithm.gamma == 1.0  # ours, verl's
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"  # follows recipe.dtype
    assert config.actor_rollout_ref.recipe == config.recipe  # where verl's workers see it
    assert "${" not in OmegaConf.to_yaml(config, resolve=False) and "???" not in OmegaConf.to_yaml(config)


def test_checkpoints_are_written_to_the_folder_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose(TINY, ["recipe.run=a", "recipe.output_root=b"])
    assert config.trainer.default_local_dir == str(tmp_path / "b" / "a" / "checkpoints")
    assert compose(TINY, ["trainer.default_local_dir=/c"]).trainer.default_local_dir == "/c"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_len=3", r"data\.max_prompt_len; did you mean data\.max_prompt_length.*write \+data"),
        ("recipe.foo=1", r"unknown key recipe\.foo"),
        ("+recipe.foo=1", r"unknown key recipe\.foo"),
        ("recipe.train.swap_optimiser=true", r"did you mean recipe\.train\.swap_optimizer"),
        ("recipe.rollout.dp=two", "could not be converted to Integer"),
        ("recipe.dtype=fp16", "expected one of fp32, bf16"),
        ("data.train_batch_size", "missing EQUAL"),
        ("~recipe.run", "does not support deletion"),
        ("actor_rollout_ref.rollout.dtype=bfloat16", "set recipe.dtype only"),
    ],
)
def test_wrong_overrides_are_refused_with_what_to_do(override, message):
    with pytest.raises(ConfigError, match=message):
        compose(TINY, [override])


def test_a_key_of_ours_that_verl_does_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_patches.config.compose.CONFIGS_DIR", tmp_path)
    text = (CONFIGS_DIR / "grpo_deepseekv3_tiny.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("  train_batch_size: 4\n", "  train_batch_sice: 4\n"))
    with pytest.raises(ConfigError, match=r"unknown key data\.train_batch_sice; did you mean data\.train_batch_size"):
        compose("wrong")
    (tmp_path / "wrong.yaml").write_text(text.replace("  line: pypi\n", "  lime: pypi\n"))
    with pytest.raises(ConfigError, match=r"unknown key recipe\.lime; did you mean recipe\.line"):
        compose("wrong")


@pytest.mark.parametrize("name", ["grpo_deepseekv2", "upstream"])  # upstream.yaml is the pin file
def test_an_unknown_config_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"no config of a run.*{TINY}") as error:
        compose(name)
    assert "upstream," not in str(error.value)


def test_another_verl_checkout_is_used(tmp_path):
    folder = tmp_path / "verl" / "trainer" / "config"
    folder.mkdir(parents=True)
    installed = (verl_config_dir() / f"{VERL_CONFIG}.yaml").read_text()
    (folder / f"{VERL_CONFIG}.yaml").write_text(installed.replace("  gamma: 1.0", "  gamma: 0.5"))
    assert compose(TINY, verl_path=tmp_path).algorithm.gamma == 0.5
    with pytest.raises(ConfigError, match="--verl-path .* has no"):
        verl_config_dir(tmp_path / "nothing")


def test_verl_reads_the_seeds_that_its_config_does_not_list():
    root = verl_config_dir().parents[1]
    assert 'get("seed", 0)' in (root / "workers/rollout/vllm_rollout/vllm_rollout_spmd.py").read_text()
    assert 'data_config.get("seed", 1)' in (root / "trainer/main_ppo.py").read_text()


def test_the_launcher_needs_neither_torch_nor_verl(run_python):
    code = """
import sys, pkgutil, importlib
for room in ("config", "launch", "cli", "upstream"):
    for module in pkgutil.iter_modules(importlib.import_module(f"verl_patches.{room}").__path__):
        importlib.import_module(f"verl_patches.{room}.{module.name}")
from verl_patches.config.compose import compose
compose("grpo_deepseekv3_256die_true_weight")
print([name for name in ("torch", "verl", "ray", "vllm", "megatron", "transformers") if name in sys.modules])
"""
    assert run_python(code).check().out.strip() == "[]"
