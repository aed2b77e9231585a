"""The pin file: its schema, the variables that the pins really read, and that nothing writes a pin down differently."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from verl_patches.config.compose import compose_config
from verl_patches.errors import ConfigError
from verl_patches.patching.spec import LINES
from verl_patches.upstream.pins import PIN_FILE, load_pins, same_version

ROOT = Path(__file__).resolve().parents[2]
PINS = load_pins()
A3 = PINS.line("a3")


def test_both_lines_are_there_and_every_repository_is_at_a_full_hash():
    assert tuple(sorted(PINS.lines)) == tuple(sorted(LINES))
    assert set(A3.system) == {"driver", "firmware", "cann_toolkit", "cann_kernels", "cann_nnal"}
    assert A3.packages["vllm"] == A3.repositories["vllm"].version
    with pytest.raises(ConfigError, match="a2"):
        PINS.line("a2")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["lines"]["a3"].update(pyhton="3.10"), r"lines\.a3\.pyhton: Extra inputs"),
        (lambda d: d["lines"]["a3"]["repositories"]["verl"].update(commit="54c9b73"), r"repositories\.verl\.commit"),
        (lambda d: d["lines"]["a3"]["container"].update(python="3.12"), r"container\.python"),
        (lambda d: d["lines"]["a3"]["container"].update(image="quay.io/x/y:latest"), r"container\.image"),
        (lambda d: d["environment"]["VLLM_USE_V1"].update(allowed="bool"), r"VLLM_USE_V1\.allowed"),
        (lambda d: d["unsupported"][0].pop("why"), r"unsupported\.0\.why: Field required"),
    ],
)
def test_a_key_that_is_wrong_is_named(tmp_path, edit, message):
    data, path = yaml.safe_load(PIN_FILE.read_text()), tmp_path / "upstream.yaml"
    edit(data)
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=message):
        load_pins(path)


RUNBOOKS = [(ROOT / "docs" / folder / "256-die-runbook.md").read_text() for folder in ("", "zh")]


def downloads_of(text):
    """What a runbook's commands download: wheels, packages, clones and their commits, files of Hugging Face."""
    code = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    hub = re.findall(r"hf (?:download|cache verify) (\S+)(?: (\w+\.json))?.*--revision (\w+)", code)
    return {
        "wheels": set(re.findall(r"^([0-9a-f]{64})  (\S+)$", code, re.MULTILINE)),
        "packages": set(re.findall(r"(torch\w*)==(\S+)", code)),
        "addresses": set(re.findall(r"https://[\w./-]+\.git\b", text)),
        "clones": set(re.findall(r"git -C packages/(\S+) checkout --quiet (\w+)", code)),
        "hub": {(name, commit) for name, _, commit in hub},
        "files": {file for _, file, _ in hub if file},
    }


def pinned_downloads(line):
    found = line.downloads
    hub = found["model"], found["data"]
    return {
        "wheels": {(found[name].sha256, found[name].file) for name in ("torch", "torch_npu")},
        "packages": {(name, line.packages[name]) for name in ("torch", "torch_npu")},
        "addresses": {*found["apex"].urls, *found["NVIDIA-apex"].urls},
        "clones": {("apex", found["apex"].commit)},
        "hub": {(files.repository, files.commit) for files in hub},
        "files": {files.file for files in hub if files.file},
    }


def test_what_the_runbooks_download_is_pinned():
    assert set(A3.downloads) == {"torch", "torch_npu", "apex", "NVIDIA-apex", "model", "data"}
    assert [downloads_of(text) for text in RUNBOOKS] == [pinned_downloads(A3)] * 2
    for name in ("torch", "torch_npu"):
        python = "cp" + A3.container.python.replace(".", "")
        assert A3.downloads[name].file.startswith(f"{name}-{A3.packages[name]}-{python}-{python}-")
    assert f"{A3.downloads['model'].bytes / 1e9:.1f} GB" in RUNBOOKS[0]


def test_another_download_in_a_runbook_is_seen():
    expected, edits = pinned_downloads(A3), {"wheels": ("340ce0432", "340ce0433"), "clones": ("49a7994e", "49a7994f")}
    edits |= {"addresses": ("ascend/apex", "ascend/apex2"), "files": (" deepscaler.json", " deepscaler2.json")}
    for kind, (old, new) in edits.items():
        assert old in RUNBOOKS[0]
        found = downloads_of(RUNBOOKS[0].replace(old, new))
        assert [name for name in expected if expected[name] != found[name]] == [kind]


@pytest.mark.parametrize(
    ("pinned", "found", "same"),
    [
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.5.1", "2.5.1.post1", False),
        ("2.5.1.post1", "2.5.1.post1.dev20250619", False),
        ("1.26.*", "1.2.6", False),
        ("0.1*", "0.1.dev20250101+ascend", True),
    ],
)
def test_same_version(pinned, found, same):
    assert same_version(pinned, found) is same


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        ("int", ["0", "-1", "12"], ["", "1.5", "x"]),
        ("120..7200", ["120", "7200"], ["119", "7201", "1e3", ""]),
        ("path", ["/a"], ["a", ""]),
        ("text", ["a", ""], []),
        (("0", "1"), ["0", "1"], ["2", "true", ""]),
    ],
)
def test_allowed_values(allowed, good, bad):
    variable = PINS.environment["VLLM_USE_V1"].model_copy(update={"allowed": allowed})
    assert all(variable.accepts(value) for value in good) and not any(variable.accepts(value) for value in bad)


# what a user may take over from another recipe, or from the other line
OF_OTHER_RECIPES = {"reward_model.overlong_buffer", "algorithm.filter_groups", "actor_rollout_ref.model.lora_rank"}
OF_OTHER_RECIPES |= {"reward_model.reward_kwargs"}  # of managers that recipe.rewards stands for
OF_OTHER_RECIPES |= {"actor_rollout_ref.rollout.prompt_logprobs"}  # SamplingParams'


@pytest.mark.parametrize("line", LINES)
def test_unsupported_keys_exist_and_our_configs_are_neutral(line):
    for name in ("deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"):
        config = compose_config(name)
        for entry in PINS.unsupported_on(line):
            value = OmegaConf.select(config, entry.key, throw_on_missing=True)
            inside_engine = entry.key.startswith("actor_rollout_ref.rollout.engine_kwargs.vllm.")
            section, _, leaf = entry.key.rpartition(".")
            exists = leaf in (OmegaConf.select(config, section) or {}) or PINS.may_be_added(entry.key, line)
            assert inside_engine or exists or entry.key in OF_OTHER_RECIPES, entry.key
            neutral = entry.planned or value is None or value in entry.neutral
            assert neutral or config.recipe.line != line, (name, entry.key, value)  # a config is for its own line
