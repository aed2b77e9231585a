"""One view of the model folder for training, one for vLLM: with the keys of DeepSeek-V3's public config.json.

Through the real loaders: tests/model (the reference folder is as published) and tests/rollout/test_parity.py.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import INDEX, MTP_LAYERS, QUANTIZATION, read_config, refuse_weights
from verl_patches.model.mindspeed.arguments import arguments_of, model_settings

PUBLIC = Path(__file__).with_name("deepseek_v3_public_config.json")
SOURCES = ("vllm-ascend", "verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM")


def test_training_reads_the_public_config_without_fp8_and_mtp():
    public, ours = json.loads(PUBLIC.read_text()), json.loads(PUBLIC.read_text())
    ours.pop(QUANTIZATION)
    assert read_config(PUBLIC) == {**ours, MTP_LAYERS: 0} and public[MTP_LAYERS] == 1
    assert arguments_of(model_settings(read_config(PUBLIC)))  # MindSpeed-LLM's arguments: every key is decided
    with pytest.raises(ConfigError, match=f"{MTP_LAYERS} is 1.*\n.*{QUANTIZATION} is"):
        arguments_of(model_settings(public))


def _store(folder, **tensors):
    save_file(tensors, folder / "1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "1.safetensors")}))
    return folder


def test_weights_in_fp8_or_damaged_files_are_refused(tmp_path):
    refuse_weights(tmp_path)  # random init: no weights at all
    (tmp_path / "config.json").write_text(PUBLIC.read_text())
    refuse_weights(_store(tmp_path, a=torch.ones(2).bfloat16(), bias=torch.ones(2)))
    stored = tmp_path / "1.safetensors"
    whole = stored.read_bytes()
    for damaged, words in ((whole[:-1], "expected [0-9]+"), (whole[:20], "header"), (b"version https://lfs", "header")):
        stored.write_bytes(damaged)
        with pytest.raises(ConfigError, match=f"1.safetensors: not a whole safetensors file .*{words}"):
            refuse_weights(tmp_path)
    stored.rename(tmp_path / "2.safetensors")
    with pytest.raises(ConfigError, match="1 of 1 files named in .* are missing, as 1.safetensors"):
        refuse_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(read_config(PUBLIC)))
    with pytest.raises(ConfigError, match="1 tensors are stored in fp8, as a; .*weights convert .* BF16 --hf"):
        refuse_weights(_store(tmp_path, a=torch.ones(2).to(torch.float8_e4m3fn), b=torch.ones(2).bfloat16()))


VLLM = """
from verl_patches import prelude_patch
import sys, types
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.deepseek_v2 import get_spec_layer_idx_from_weight_name
from verl_patches.layout.model_folder import for_vllm

def config(**more):
    return EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
                      max_model_len=4096, enforce_eager=True, **more).create_model_config()

plain, view = config(), config(hf_overrides=for_vllm)
assert plain.quantization == "fp8" and view.quantization is None
assert view.compute_hash() and repr(view.hf_config)  # both print the configuration
assert get_spec_layer_idx_from_weight_name(view.hf_config, "model.layers.61.enorm.weight") == 61
nothing = config(hf_overrides={"num_nextn_predict_layers": 0})
assert get_spec_layer_idx_from_weight_name(nothing.hf_config, "model.layers.61.enorm.weight") is None
if "ascend" in sys.argv:
    import torch, vllm.platforms
    for name, has in (("torch_npu.npu.streams", ["Event"]),
                      ("torchair.scope", ["npu_stream_switch", "npu_wait_tensor"])):
        module = sys.modules[name] = types.ModuleType(name)  # imported there, not used here
        vars(module).update(dict.fromkeys(has, torch.cuda.Event))
    from vllm_ascend.platform import NPUPlatform
    vllm.platforms._current_platform = NPUPlatform()
    torch.utils.rename_privateuse1_backend("npu")  # VllmConfig makes a torch.device of the name
    try:
        config()
    except ValueError as error:
        assert "fp8 quantization is currently not supported in npu" in str(error), error
    else:
        raise AssertionError("vllm-ascend takes fp8")
    made = VllmConfig(model_config=config(hf_overrides=for_vllm))
    assert made.quant_config is None and "vllm_ascend" in made.parallel_config.worker_cls
"""


def _vllm(run_warm, folder, *words, line, **env):
    (folder / "config.json").write_text(PUBLIC.read_text())
    env = {"VLLM_LOGGING_LEVEL": "ERROR", **env}
    run_warm(VLLM, str(folder), *words, patches=f"line={line},platform=cpu", env=env, timeout_s=240).check()


@pytest.mark.slow
def test_vllm_sees_no_fp8(run_warm, tmp_path):
    _vllm(run_warm, tmp_path, line="pypi", VLLM_USE_V1="0")


@pytest.mark.slow
@pytest.mark.upstream
def test_vllm_ascend_refuses_the_folder_and_takes_the_view(run_warm, tmp_path, a3_sources):
    path = os.pathsep.join(map(str, a3_sources(*SOURCES)))
    _vllm(run_warm, tmp_path, "ascend", line="a3", VLLM_USE_V1="1", PYTHONPATH=path)
