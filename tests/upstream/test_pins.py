"""Test the pin file: its schema, the variables that the pins really read, and that no file states another pin."""

import pytest
import yaml
from omegaconf import OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.patching.spec import LINES
from verl_patches.run.compose import compose_config
from verl_patches.upstream.pins import PIN_FILE, load_pins, same_version

PINS = load_pins()
A3 = PINS.line("a3")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["lines"]["a3"].update(pyhton="3.10"), r"lines\.a3\.pyhton: Extra inputs"),
        (lambda d: d["lines"]["a3"]["repositories"]["verl"].update(commit="54c9b73"), r"repositories\.verl\.commit"),
        (lambda d: d["unsupported"][0].pop("why"), r"unsupported\.0\.why: Field required"),
    ],
)
def test_a_key_that_is_wrong_is_named(tmp_path, edit, message):
    data, path = yaml.safe_load(PIN_FILE.read_text()), tmp_path / "upstream.yaml"
    edit(data)
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=message):
        load_pins(path)


@pytest.mark.parametrize(
    ("pinned", "found", "same"),
    [
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.5.1.post1", "2.5.1.post1.dev20250619", False),
        ("1.26.*", "1.2.6", False),
    ],
)
def test_same_version(pinned, found, same):
    assert same_version(pinned, found) is same


# keys that a user may copy from another recipe, or from the other line
FOREIGN_KEYS = {"reward_model.overlong_buffer", "algorithm.filter_groups", "actor_rollout_ref.model.lora_rank"}
FOREIGN_KEYS |= {"reward_model.reward_kwargs"}  # read by reward managers that recipe.rewards replaces
FOREIGN_KEYS |= {"actor_rollout_ref.rollout.prompt_logprobs"}  # a field of vLLM's SamplingParams


@pytest.mark.parametrize("line", LINES)
def test_unsupported_keys_exist_and_our_configs_are_neutral(line):
    for name in ("deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"):
        config = compose_config(name)
        for entry in PINS.unsupported_on(line):
            value = OmegaConf.select(config, entry.key, throw_on_missing=True)
            inside_engine = entry.key.startswith("actor_rollout_ref.rollout.engine_kwargs.vllm.")
            section, _, leaf = entry.key.rpartition(".")
            exists = leaf in (OmegaConf.select(config, section) or {}) or PINS.may_be_added(entry.key, line)
            assert inside_engine or exists or entry.key in FOREIGN_KEYS, entry.key
            neutral = value is None or value in entry.neutral
            # a configuration is neutral on its own line only
            assert neutral or config.recipe.line != line, (name, entry.key, value)


def test_sources_of_ascend_come_from_gitcode_first_then_gitee_then_github():
    names = ("MindSpeed", "MindSpeed-LLM")
    hosts = {name: [url.split("/")[2] for url in A3.repositories[name].urls] for name in names}
    assert hosts == dict.fromkeys(names, ["gitcode.com", "gitee.com", "github.com"])
