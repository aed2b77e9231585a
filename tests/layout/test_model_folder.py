"""Test views of the model folder for training and for vLLM, with the keys of DeepSeek-V3's public config.json.

tests/model, whose reference folder is as published, and tests/rollout/test_parity.py use the real loaders.
"""

import json
import os
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import MTP_LAYERS, QUANTIZATION, read_config
from verl_patches.model.mindspeed.arguments import command_line_arguments, model_settings

PUBLIC = Path(__file__).with_name("deepseek_v3_public_config.json")
SOURCES = ("vllm-ascend", "verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM")


def test_training_reads_the_public_config_without_fp8_and_mtp():
    public, ours = json.loads(PUBLIC.read_text()), json.loads(PUBLIC.read_text())
    ours.pop(QUANTIZATION)
    assert read_config(PUBLIC) == {**ours, MTP_LAYERS: 0} and public[MTP_LAYERS] == 1
    assert command_line_arguments(model_settings(read_config(PUBLIC)))  # no key is refused
    with pytest.raises(ConfigError, match=f"{MTP_LAYERS} is 1.*\n.*{QUANTIZATION} is"):
        command_line_arguments(model_settings(public))


VLLM = """
from verl_patches import prelude_patch
import sys, torch, types, vllm.platforms
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from verl_patches.layout.model_folder import edit_for_vllm

for name, has in (("torch_npu.npu.streams", ["Event"]),
                  ("torchair.scope", ["npu_stream_switch", "npu_wait_tensor"])):
    module = sys.modules[name] = types.ModuleType(name)  # imported there, not used here
    vars(module).update(dict.fromkeys(has, torch.cuda.Event))
from vllm_ascend.platform import NPUPlatform
vllm.platforms._current_platform = NPUPlatform()
torch.utils.rename_privateuse1_backend("npu")  # VllmConfig makes a torch.device of the name

def config(**more):
    return EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
                      max_model_len=4096, enforce_eager=True, **more).create_model_config()

try:
    config()
except ValueError as error:
    assert "fp8 quantization is currently not supported in npu" in str(error), error
else:
    raise AssertionError("vllm-ascend takes fp8")
view = config(hf_overrides=edit_for_vllm)
assert view.quantization is None and view.compute_hash() and repr(view.hf_config)  # both print the configuration
made = VllmConfig(model_config=view)
assert made.quant_config is None and "vllm_ascend" in made.parallel_config.worker_cls
"""


@pytest.mark.slow
@pytest.mark.upstream
def test_vllm_ascend_refuses_the_folder_and_takes_the_view(run_warm, tmp_path, a3_sources):
    """Check vllm-ascend alone; tests/rollout/test_parity.py checks vLLM itself."""
    (tmp_path / "config.json").write_text(PUBLIC.read_text())
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V1": "1"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, a3_sources(*SOURCES)))
    run_warm(VLLM, str(tmp_path), patches="line=a3,platform=cpu", env=env).check()
