"""Test views of the model folder for training and for vLLM, with the keys of DeepSeek-V3's public config.json.

tests/model, whose reference folder is as published, and tests/rollout/test_parity.py use the real loaders.
"""

import json
import os
from pathlib import Path

import pytest

from tests.layout.public_folder import config_of_transformers_5
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import (
    MTP_LAYERS,
    QUANTIZATION,
    class_of_family,
    edit_for_training,
    edit_for_vllm,
    read_config,
    require_whole_folder,
)
from verl_patches.model.mindspeed.arguments import command_line_arguments, model_settings

PUBLIC = Path(__file__).with_name("deepseek_v3_public_config.json")
MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
SOURCES = ("vllm-ascend", "verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM")


def test_training_reads_the_public_config_without_fp8_and_mtp():
    public, ours = json.loads(PUBLIC.read_text()), json.loads(PUBLIC.read_text())
    ours.pop(QUANTIZATION)
    assert read_config(PUBLIC) == {**ours, MTP_LAYERS: 0} and public[MTP_LAYERS] == 1
    assert command_line_arguments(model_settings(read_config(PUBLIC)))  # no key is refused
    with pytest.raises(ConfigError, match=f"{MTP_LAYERS} is 1.*\n.*{QUANTIZATION} is"):
        command_line_arguments(model_settings(public))


def write_config(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("old", [{}, {"rope_theta": 50000}, {"rope_scaling": None}], ids=str)
@pytest.mark.parametrize("kept", ["both types", "rope_type alone"])
def test_a_config_of_transformers_5_is_read_as_that_of_4(tmp_path, old, kept):
    """Compare the file as training reads it, and transformers' configuration as Megatron and vLLM get it."""
    from transformers import AutoConfig

    public = {**json.loads(PUBLIC.read_text()), **old}
    public.pop("auto_map")  # names files of the model's own code
    new = config_of_transformers_5(public)
    if kept == "rope_type alone":
        new["rope_parameters"].pop("type", None)
    folders = write_config(tmp_path / "4", public), write_config(tmp_path / "5", new)
    expected, found = map(read_config, folders)
    assert found == {**expected, "transformers_version": "5.3.0"}
    for edit in (edit_for_training, edit_for_vllm):
        expected, found = (AutoConfig.from_pretrained(folder) for folder in folders)
        assert found.torch_dtype is None and "rope_parameters" in vars(found)  # control: the pinned transformers
        for config in (expected, found):
            edit(config)
            vars(config).update(_name_or_path=None, transformers_version=None)
        assert vars(found) == vars(expected)


def test_the_dtype_of_transformers_4_57_and_rope_scaling_beside_new_keys_are_read(tmp_path):
    public = json.loads(PUBLIC.read_text())
    dtype = {key: value for key, value in public.items() if key != "torch_dtype"} | {"dtype": "float16"}
    assert read_config(write_config(tmp_path, dtype)) == read_config(PUBLIC) | {"torch_dtype": "float16"}
    both = public | {"rope_parameters": {"rope_type": "default"}}
    assert read_config(write_config(tmp_path, both)) == read_config(PUBLIC)
    plain = {key: value for key, value in public.items() if key not in ("rope_scaling", "rope_theta")}
    found = read_config(write_config(tmp_path, plain | {"rope_parameters": {"rope_theta": 5e4}}))  # without a type
    assert (found["rope_theta"], found["rope_scaling"]["factor"]) == (5e4, 1)


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_a_setting_of_yarn_that_one_framework_ignores_is_refused(tmp_path, section):
    config = json.loads(PUBLIC.read_text())
    config = config_of_transformers_5(config) if section == "rope_parameters" else config
    config[section]["truncate"] = False
    with pytest.raises(ConfigError, match="config.json: the settings of rope have truncate; expected factor"):
        read_config(write_config(tmp_path, config))


def test_a_model_of_the_family_is_loaded_by_its_auto_class(tiny_model, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM

    load = classmethod(class_of_family(AutoConfig.from_pretrained.__func__))  # as the catalogue's row wraps it
    monkeypatch.setattr(AutoConfig, "from_pretrained", load)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tiny_model), DeepseekV3ForCausalLM)


TOKENIZER_FAULTS = {
    "no JSON": ("{", "tokenizer_config.json is cut off"),
    "transformers 5": ({"tokenizer_class": "TokenizersBackend"}, "set tokenizer_class to PreTrainedTokenizerFast"),
    "list": ({"extra_special_tokens": ["<|user|>"]}, "rename extra_special_tokens, if there, additional"),
}


@pytest.mark.parametrize("fault", TOKENIZER_FAULTS)
def test_a_tokenizer_that_cannot_be_loaded_is_refused_by_name(tiny_model, tmp_path, fault):
    content, words = TOKENIZER_FAULTS[fault]
    require_whole_folder(tiny_model)  # control
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        require_whole_folder(tmp_path)


def test_a_repository_in_the_hubs_cache_is_refused_with_the_folder_to_give(tiny_model, tmp_path):
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in tiny_model.iterdir():
        (snapshot / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match=f"give a model's folder in it: {snapshot}"):
        require_whole_folder(tmp_path)
    require_whole_folder(snapshot)
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0123")
    with pytest.raises(ConfigError, match="tokenizer.json is a link to ../../blobs/0123"):
        require_whole_folder(snapshot)


CONFIG = """
from verl_patches import prelude_patch
import json, pathlib, sys, torch, types, vllm.platforms
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from verl_patches.layout.model_folder import edit_for_vllm

def config(folder, **more):
    return EngineArgs(model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
                      **{"enforce_eager": True, **more}).create_model_config()
"""
ASCEND = """
for name, has in (("torch_npu.npu.streams", ["Event"]),
                  ("torchair.scope", ["npu_stream_switch", "npu_wait_tensor"])):
    module = sys.modules[name] = types.ModuleType(name)  # imported there, not used here
    vars(module).update(dict.fromkeys(has, torch.cuda.Event))
from vllm_ascend.platform import NPUPlatform
vllm.platforms._current_platform = NPUPlatform()
torch.utils.rename_privateuse1_backend("npu")  # VllmConfig makes a torch.device of the name
"""
PUBLISHED = """
try:
    config(sys.argv[1])
except ValueError as error:
    assert "fp8 quantization is currently not supported in npu" in str(error), error
else:
    raise AssertionError("vllm-ascend takes fp8")
view = config(sys.argv[1], hf_overrides=edit_for_vllm, max_model_len=4096)
assert view.quantization is None and view.compute_hash() and repr(view.hf_config)  # both print the configuration
made = VllmConfig(model_config=view)
assert made.quant_config is None and "vllm_ascend" in made.parallel_config.worker_cls
"""
FAMILY = """
for folder in sys.argv[1:]:
    view = config(folder, hf_overrides=edit_for_vllm)
    stored = json.loads(pathlib.Path(folder, "config.json").read_text())
    assert (view.use_mla, view.max_model_len) == (True, stored["max_position_embeddings"]), folder
assert not config(folder).use_mla  # control: the last one is Kimi-K2
"""
GRAPHS = """
options = {"additional_config": {"torchair_graph_config": {"enabled": True}, "refresh": True}}
for folder in sys.argv[1:]:
    VllmConfig(model_config=config(folder, hf_overrides=edit_for_vllm, enforce_eager=False), **options)
try:
    VllmConfig(model_config=config(folder, enforce_eager=False), **options)
except NotImplementedError as error:
    assert "only works with deepseek model" in str(error), error
else:
    raise AssertionError("control: Kimi-K2 under its own model_type has graphs")
"""


@pytest.fixture
def run_ascend(run_warm, a3_sources):
    """Return run_ascend(code, *arguments), which runs code after CONFIG on vllm-ascend's platform."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V1": "1"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, a3_sources(*SOURCES)))
    options = {"patches": "line=a3,platform=cpu", "env": env}
    return lambda code, *arguments: run_warm(CONFIG + ASCEND + code, *map(str, arguments), **options).check()


@pytest.fixture
def family_folders(tmp_path):
    """Return folders with the config.json of tiny Moonlight and Kimi-K2."""
    names = ("moonlight", "kimi_k2")
    return [write_config(tmp_path / name, json.loads((MODELS / f"{name}_tiny.json").read_text())) for name in names]


@pytest.mark.slow
@pytest.mark.upstream
def test_vllm_ascend_refuses_the_folder_and_takes_the_view(run_ascend, tmp_path):
    """Check vllm-ascend alone; tests/rollout/test_parity.py checks vLLM itself."""
    (tmp_path / "config.json").write_text(PUBLIC.read_text())
    run_ascend(PUBLISHED, tmp_path)


@pytest.mark.slow
@pytest.mark.upstream
def test_vllm_ascend_chooses_latent_attention_and_graphs_for_the_family(run_ascend, family_folders):
    run_ascend(FAMILY + GRAPHS, *family_folders)


@pytest.mark.slow
def test_vllm_chooses_latent_attention_for_the_family(run_warm, family_folders):
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V1": "0"}
    run_warm(CONFIG + FAMILY, *map(str, family_folders), patches="line=pypi,platform=cpu", env=env).check()
