import shutil

import pytest
from omegaconf import OmegaConf

from tests.runs import composed
from verl_patches.errors import ConfigError, require_checks
from verl_patches.recipe import RolloutAscend
from verl_patches.rules import RULES
from verl_patches.run.compose import compose_config
from verl_patches.run.resolve import CONFIGS_DIR
from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir
from verl_patches.values import leaves

TINY = "deepseekv3_tiny_cpu"


def test_verls_config_is_below_ours_and_everything_is_resolved():
    config = compose_config(TINY, ["data.train_batch_size=8", "recipe.dtype=bf16", "+data.image_key=x"])
    assert config.data.train_batch_size == 8 and config.data.image_key == "x"
    assert config.trainer.project_name == "deepseekv3_tiny" and config.algorithm.gamma == 1.0  # ours, verl's
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"  # follows recipe.dtype
    assert "${" not in OmegaConf.to_yaml(config, resolve=False) and "???" not in OmegaConf.to_yaml(config)


def test_checkpoints_are_written_to_the_folder_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose_config(TINY, ["recipe.run=a", "recipe.output_root=b"])
    assert config.trainer.default_local_dir == str(tmp_path / "b" / "a" / "checkpoints")
    assert compose_config(TINY, ["trainer.default_local_dir=/c"]).trainer.default_local_dir == "/c"


PATH_KEYS = "actor_rollout_ref.model.path data.val_files data.custom_cls.path custom_reward_function.path".split()
PATH_KEYS += ["recipe.rollout.replay", "critic.model.path"]


@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_what_a_run_reads_is_found_from_other_folders_too(tmp_path, monkeypatch, line):
    """Check this because workers of a joined Ray are in other folders; addresses and absolute paths stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    own = [f"recipe.line={line}", "algo=ppo", "data.custom_cls.name=Data", "recipe.rewards=null"]
    files = "data.train_files=[a/1.parquet,/b/2.parquet,s3://c/3.parquet,'~/4.parquet']"
    config = compose_config(TINY, [*own, files, *(f"{key}=a/b" for key in PATH_KEYS)])
    assert [OmegaConf.select(config, key) for key in PATH_KEYS] == [str(tmp_path / "a/b")] * len(PATH_KEYS)
    assert config.data.train_files == [
        f"{tmp_path}/a/1.parquet",
        "/b/2.parquet",
        "s3://c/3.parquet",
        "/home/me/4.parquet",
    ]
    assert "=a/b" not in OmegaConf.to_yaml(config).replace(": ", "=")  # also in verl's keys
    rewards = "[{name: python, path: a.py, function: f}, {name: reward_model, path: b}, {name: maths}]"
    config = compose_config(TINY, [f"recipe.line={line}", f"recipe.rewards={rewards}"])
    assert [entry.get("path") for entry in config.recipe.rewards] == [f"{tmp_path}/a.py", f"{tmp_path}/b", None]
    homes = ["recipe.output_root=~/o", "trainer.default_local_dir=~/c", "trainer.resume_from_path=~/r"]
    config = compose_config(TINY, [f"recipe.line={line}", *homes])
    found = config.recipe.output_root, config.trainer.default_local_dir, config.trainer.resume_from_path
    assert found == ("/home/me/o", "/home/me/c", "/home/me/r")
    with pytest.raises(ConfigError, match="~nobody-here/c: expected ~ to stand for a home folder"):
        compose_config(TINY, ["trainer.default_local_dir=~nobody-here/c"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_len=3", r"unknown key data\.max_prompt_len; did you mean data\.max_prompt_length"),
        ("data.image_key=x", r"verl reads it: add it as \+data\.image_key="),
        ("recipe.train.swap_optimiser=true", r"did you mean recipe\.train\.swap_optimizer"),
        ("layuot=tp2ep2", "unknown key layuot; did you mean layout"),
        ("recipe.rewards=[{name:", r"no viable alternative at input '\[{name:'; put an override with blanks"),
        ("recipe.dtype=fp16", "expected one of fp32, bf16"),
        ("~recipe.run", "does not support deletion"),
        ("actor_rollout_ref.rollout.dtype=bfloat16", "set recipe.dtype only"),
    ],
)
def test_wrong_overrides_are_refused_with_what_to_do(override, message):
    with pytest.raises(ConfigError, match=message):
        compose_config(TINY, [override])


BIG = "deepseekv3_256die_random_init"
MODEL = "actor_rollout_ref.model.override_config.model_config.num_hidden_layers"


@pytest.mark.parametrize(
    ("name", "overrides", "layers", "stages"),
    [
        # the first stage has the 3 dense layers and one with experts
        (BIG, ["recipe.num_hidden_layers=16"], 16, [4, 2, 2, 2, 2, 2, 1, 1]),
        (BIG, ["recipe.num_hidden_layers=16", "recipe.train.layers_per_stage=[9,1,1,1,1,1,1,1]"], 16, [9, *[1] * 7]),
        (TINY, ["recipe.num_hidden_layers=3"], 3, None),
        ("deepseekv3_64die", ["recipe.num_hidden_layers=16"], 16, [5, 4, 4, 3]),
    ],
)
def test_the_first_layers_are_cut_wherever_the_depth_is_read(name, overrides, layers, stages):
    run = composed(name, overrides)
    views = run.engine.get("hf_overrides", {})
    assert run.model.num_hidden_layers == run.hf_config["num_hidden_layers"] == layers
    assert views.get("num_hidden_layers") == OmegaConf.select(run.verl, MODEL) == run.recipe.num_hidden_layers
    assert run.recipe.train.layers_per_stage == stages
    require_checks(RULES.checks(run))


@pytest.mark.parametrize(("name", "layers", "others", "message"), [
    (BIG, 10, [], r"num_hidden_layers is 10; expected 11 to 61: .* 3 dense .* 8 pipeline"),
    (TINY, 3, [f"+{MODEL}=2"], f"{MODEL} is set; expected none"),
])  # fmt: skip
def test_layers_that_the_model_or_its_stages_do_not_have_are_refused(name, layers, others, message):
    with pytest.raises(ConfigError, match=message):
        compose_config(name, [f"recipe.num_hidden_layers={layers}", *others])


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Copy configs/ of this repository to a folder that a test may change."""
    folder = tmp_path / "configs"
    shutil.copytree(CONFIGS_DIR, folder)
    monkeypatch.setattr("verl_patches.run.compose.CONFIGS_DIR", folder)
    return folder


def test_a_damaged_file_is_refused_by_name_and_line(configs):
    file = configs / "algo/grpo.yaml"
    file.write_bytes(file.read_bytes() + b"\n\ttrainer: {}\n")
    with pytest.raises(ConfigError, match=rf"{TINY}: .*{file}.*line \d+") as error:
        compose_config(TINY)
    assert "\n" not in str(error.value)


def test_a_key_of_ours_that_verl_does_not_have_is_refused(configs):
    text = (configs / "deepseekv3_tiny.yaml").read_text().replace("level: null]", "level: null, algo: grpo]")
    for key, wrong, full in (("train_batch_size", "train_batch_sice", "data.{}"), ("line", "lime", "recipe.{}")):
        (configs / "wrong.yaml").write_text(text.replace(f"  {key}: ", f"  {wrong}: "))
        with pytest.raises(ConfigError, match=f"{full.format(wrong)};.* {full.format(key)}"):
            compose_config("wrong")


RUNS = sorted(path.stem for path in CONFIGS_DIR.glob("deepseekv3_*.yaml") if "algo: " in path.read_text())
ALGORITHMS = sorted(path.stem for path in (CONFIGS_DIR / "algo").glob("*.yaml"))


@pytest.mark.parametrize("name", ["deepseekv3_256die", "grpo_deepseekv2", "upstream"])  # a base file, and the pin file
def test_a_name_of_no_run_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"{name}: expected one of {', '.join(RUNS)}, "):
        compose_config(name)


@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_a_layout_without_a_folder_is_one_of_the_runs_line(line):
    config = compose_config(TINY, ["layout=tp2ep2", f"recipe.line={line}"])
    assert config == compose_config(TINY, [f"layout={line}/tp2ep2", f"recipe.line={line}"])
    assert config.trainer.n_gpus_per_node == 4 and config.recipe.line == line


def test_presets_have_level_reference_and_smokes_none():
    levels = {path.stem: composed(path.stem).recipe.level for path in CONFIGS_DIR.glob("*die*.yaml") if is_run(path)}
    assert len(levels) > 10 and set(levels.values()) == {"reference"}
    smoke = composed("deepseekv3_tiny_cpu")
    assert smoke.recipe.level == "tuned" and smoke.recipe.rollout.ascend == RolloutAscend()


def is_run(path):
    return "algo: grpo" in path.read_text()


@pytest.mark.parametrize("level", ["safe", "reference", "tuned"])
def test_keys_of_a_run_win_over_those_of_a_level_and_these_over_the_bases(level):
    """Check also that a level has scalar keys alone, and that safe is eager on one node."""
    group = OmegaConf.load(CONFIGS_DIR / "level" / f"{level}.yaml")
    assert not any(isinstance(value, list) for _, value in leaves(OmegaConf.to_container(group)))
    found = {name: composed(name, [f"level={level}"]).recipe for name in ("moonlight_32die", "deepseekv3_16die")}
    ascend = found["moonlight_32die"].rollout.ascend
    assert (ascend.multistream_moe, ascend.scheduler) == (False, "v1" if level == "tuned" else "ascend")
    assert [recipe.rollout.ascend.graphs for recipe in found.values()] == [True, level != "safe"]
    assert {recipe.level for recipe in found.values()} == {level}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("level=fast", "level=fast: expected one of reference, safe, tuned"),
        ("recipe.level=safe", "expected level=safe"),
    ],
)
def test_a_level_is_chosen_by_its_group_alone(override, words):
    with pytest.raises(ConfigError, match=words):
        composed("deepseekv3_16die", [override])


def test_a_level_for_a_config_without_one_is_refused(configs):
    text = (configs / "deepseekv3_tiny.yaml").read_text()
    (configs / "other.yaml").write_text(text.replace("level: null]", "algo: grpo]"))
    with pytest.raises(ConfigError, match="other.yaml has no `level: NAME` in its defaults"):
        compose_config("other", ["level=safe"])


def test_an_unknown_algorithm_is_refused_with_the_list():
    with pytest.raises(ConfigError, match=f"^algo=grpo2: expected one of {', '.join(ALGORITHMS)}$"):
        compose_config(TINY, ["algo=grpo2"])


SECRET = "s3cretvalue"


@pytest.mark.parametrize(
    "override",
    [
        f"+data.x={{api_key: {SECRET}}}",
        f"+data.x=hf_{SECRET}{SECRET}",
        f"+data.wandb_api_key={SECRET}]",  # nor does it quote Hydra's grammar
    ],
)
def test_a_secret_is_refused_by_its_key_or_form_and_is_not_printed(override):
    with pytest.raises(ConfigError, match="looks like a secret") as error:
        compose_config(TINY, [override])
    assert SECRET not in str(error.value)


def test_a_secret_in_a_file_is_refused_and_words_that_look_like_one_are_not(configs):
    free = "+custom_reward_function.reward_kwargs"
    compose_config(TINY, [f"{free}.answer_key=solution", f"{free}.eos_token='</s>'", f"{free}.api_key=null"])
    file = configs / f"{TINY}.yaml"
    file.write_text(file.read_text() + f"\ntrainer: {{experiment_name: hf_{SECRET}{SECRET}}}\n")
    with pytest.raises(ConfigError, match="trainer.experiment_name looks like a secret") as error:
        compose_config(TINY)
    assert SECRET not in str(error.value)


def test_another_verl_checkout_is_used(tmp_path):
    folder = tmp_path / "verl" / "trainer" / "config"
    folder.mkdir(parents=True)
    installed = (verl_config_dir() / f"{VERL_CONFIG}.yaml").read_text()
    (folder / f"{VERL_CONFIG}.yaml").write_text(installed.replace("  gamma: 1.0", "  gamma: 0.5"))
    assert compose_config(TINY, verl_path=tmp_path).algorithm.gamma == 0.5
    with pytest.raises(ConfigError, match="nothing: expected .*, found none"):
        verl_config_dir(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+data.own_key=1", "unknown key data.own_key"),
        ("+algorithm.filter_groups.enable=true", "algorithm.filter_groups .*recipe.filter_groups.metric"),
        ("+reward_model.overlong_buffer.enable=true", "overlong_buffer .*an entry of name length"),
    ],
)
def test_an_added_key_that_nothing_reads_is_refused(override, words):
    with pytest.raises(ConfigError, match=f"config .*:\n  .*{words}"):
        compose_config(TINY, [override])


ADDED = """
data.image_key trainer.rollout_data_dir custom_reward_function.reward_kwargs.format_weight
actor_rollout_ref.rollout.engine_kwargs.vllm.block_size
actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff
actor_rollout_ref.model.override_config.model_config.rope_theta
"""


@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_added_keys_that_are_read_pass(line):
    config = compose_config(TINY, [f"recipe.line={line}", *(f"+{key}=1" for key in ADDED.split())])
    assert [OmegaConf.select(config, key) for key in ADDED.split()] == [1] * 6
    for own in ("trainer.own.key", "trainer.own", "trainer.own.*"):
        assert compose_config(TINY, [f"recipe.added_keys=[{own}]", "+trainer.own={key: 2}"]).trainer.own.key == 2
    with pytest.raises(ConfigError, match="unknown key trainer.owner"):
        compose_config(TINY, ["recipe.added_keys=[trainer.own]", "+trainer.owner=2"])


def test_the_launcher_needs_neither_torch_nor_verl(run_python):
    code = """
import sys, pkgutil, importlib
for room in ("run", "launch", "cli", "upstream"):
    for module in pkgutil.iter_modules(importlib.import_module(f"verl_patches.{room}").__path__):
        importlib.import_module(f"verl_patches.{room}.{module.name}")
from verl_patches.catalog import platform_rows
from verl_patches.run.compose import compose
compose("deepseekv3_256die_true_weight", (), platform_rows)
print([name for name in ("torch", "verl", "ray", "vllm", "megatron", "transformers") if name in sys.modules])
"""
    assert run_python(code).check().out.strip() == "[]"


def test_a_key_that_only_one_line_reads_is_refused_on_the_other():
    key = "+trainer.wandb_proxy=http://proxy"
    assert compose_config(TINY, [key]).trainer.wandb_proxy
    with pytest.raises(ConfigError, match="unknown key trainer.wandb_proxy"):
        compose_config(TINY, [key, "recipe.line=a3"])


def test_a_file_that_includes_itself_is_refused_by_name(configs):
    file = configs / "deepseekv3_tiny_cpu.yaml"
    file.write_bytes(file.read_bytes().replace(b"defaults: [", b"defaults: [deepseekv3_tiny_cpu, ", 1))
    with pytest.raises(ConfigError, match=f"^{file}.*: its defaults include the file"):
        compose_config(TINY)
