"""Read an HF model folder: config.json as training and as vLLM need it, and the headers of weight files.

DeepSeek publishes V3 and R1 with fp8 weights and one layer for multi-token prediction (MTP), which config.json states
in `quantization_config` and `num_nextn_predict_layers`. Conversion to bf16 does not change config.json. This recipe
trains and serves bf16 or fp32 weights without MTP layers, so both frameworks read an edited config.json; the edit is
made in memory, in each process, because the run's folder need not be shared between nodes.

    training   no quantization_config, num_nextn_predict_layers 0: verl's converter and MindSpeed-LLM refuse others
    vLLM       no quantization_config: vllm-ascend refuses the method
               (vllm_ascend.platform.NPUPlatform.supported_quantization), vLLM would build fp8 layers.
               num_nextn_predict_layers stays: vLLM 0.9.1 builds MTP layers only with a speculative_config and reads it
               only to pass over their tensors; with 0 its loader ends in a KeyError
               (vllm.model_executor.models.deepseek_v2.DeepseekV2ForCausalLM.load_weights)

DeepSeek-V3's family has models with other settings, which are read as one (`rename_to_deepseek_v3`): Kimi-K2 has a
`model_type` of its own, and Moonlight has plain rotary positions, `rope_scaling` null. These become yarn of factor 1,
which interpolates nothing: each frequency is divided by 1, and every scale that follows from the factor is 1.
MindSpeed-LLM orders the rotary part of a head as DeepSeek's weights do with yarn only
(mindspeed_llm.tasks.models.transformer.multi_head_latent_attention.MultiHeadLatentAttention.forward), and the graphs of
vllm-ascend 0.9.1 read yarn's tables (vllm_ascend.attention.mla_v1.AscendMLAImpl.forward).

A folder that transformers 5 saved has its positions in `rope_parameters` and its dtype in `dtype`. The pinned
transformers (4.51, 4.52) read neither, and would compute with plain rope: both get their names of transformers 4.

`quantization_config` is deleted, not set to None: transformers 4.51 to 4.52 call its `.to_dict()` when a configuration
is printed (transformers.configuration_utils.PretrainedConfig.to_diff_dict), which verl does on rank 0. No torch here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from verl_patches.errors import ConfigError
from verl_patches.shared_files import file_fault

QUANTIZATION, MTP_LAYERS = "quantization_config", "num_nextn_predict_layers"
INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
SCALE_SUFFIX = "weight_scale_inv"  # the names of fp8 weights' scales end so
MODEL_TYPES = ("deepseek_v3", "kimi_k2")  # model types of DeepSeek-V3's architecture; the first stands for all
# keys of config.json with the only value that training, rollout and plans support; a missing key means this value
REQUIRED_VALUES: Mapping[str, Any] = {
    "model_type": MODEL_TYPES[0],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0,
    "tie_word_embeddings": False,
    MTP_LAYERS: 0,
    QUANTIZATION: None,
    "rope_interleave": True,
}
YARN_KEYS = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")
_SMALL_FILES = "*.json", "*.jinja", "*.model", "*.py"  # files of settings and tokenizer
_TOKENIZER = "AutoTokenizer"
_CODE_KINDS = _TOKENIZER, "AutoConfig", "AutoModel"  # kinds of code that a folder may name; the last two do not run
_TOKENS_OF_5 = "extra_special_tokens"  # a list in transformers 5, a dict in 4


def read_config(path: str | Path) -> dict[str, Any]:
    """Return config.json (the file, or the folder that holds it) as training reads it; ConfigError without it.

    Raise ConfigError too for weights in another format than bf16 and DeepSeek's FP8, such as Kimi-K2-Thinking's int4.
    """
    config = read_stored_config(path)
    stored = config.get(QUANTIZATION)
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if stored is not None and method != "fp8":
        raise ConfigError(
            f"{path}: {QUANTIZATION} has quant_method {method!r}, expected 'fp8' or no {QUANTIZATION}: beside bf16, "
            "only DeepSeek's FP8 is supported; give a folder in one of these"
        )
    config = without_fp8_and_mtp(config)
    rename_to_deepseek_v3(config)
    return config


def without_fp8_and_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of config.json's content for bf16 or fp32 weights without MTP layers."""
    kept = {key: value for key, value in config.items() if key != QUANTIZATION}
    return {**kept, MTP_LAYERS: 0} if kept.get(MTP_LAYERS) else kept


def read_stored_config(path: str | Path) -> dict[str, Any]:
    """Return config.json with its FP8 and MTP entries, and transformers 4's names of keys; ConfigError without it."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        fault = file_fault(path) or "does not exist; expected a HF model folder or its config.json"
        raise ConfigError(f"{path} {fault}")
    config = read_json_object(path)
    _rename_new_keys(config, str(path))
    return config


def _rename_new_keys(config: dict[str, Any], where: str) -> None:
    """Give the keys of transformers 5 their names of transformers 4, in place; `rope_scaling` has priority.

    Raise ConfigError for a setting of yarn that not all of Megatron, MindSpeed-LLM and vLLM read.
    """
    if dtype := config.pop("dtype", None):
        config["torch_dtype"] = config.get("torch_dtype") or dtype
    new = config.pop("rope_parameters", None)
    rope = config.get("rope_scaling") or new
    if not isinstance(rope, dict):
        return
    if theta := {**rope, **(new or {})}.get("rope_theta"):
        config["rope_theta"] = theta
    kind = rope.get("type") or rope.get("rope_type") or "default"  # 4 writes the first or both, 5 the second or both
    yarn = {k: v for k, v in rope.items() if v is not None and k not in ("type", "rope_type", "rope_theta")}
    if unknown := sorted(yarn.keys() - {*YARN_KEYS}):
        raise ConfigError(
            f"{where}: the settings of rope have {', '.join(unknown)}; expected {', '.join(YARN_KEYS)} alone, as "
            "Megatron and vLLM do not both read others: remove a key if transformers computes the same without it; "
            "else this model is not supported"
        )
    config["rope_scaling"] = {**yarn, "type": kind} if yarn or kind != "default" else None


def rename_to_deepseek_v3(config: dict[str, Any]) -> None:
    """Give a configuration of the family DeepSeek-V3's model_type, and yarn of factor 1 for plain positions, in place.

    beta_fast and beta_slow are equal, so that no frequency lies between the two: interpolation is exact.
    """
    if config.get("model_type") not in MODEL_TYPES:
        return
    config["model_type"] = MODEL_TYPES[0]
    if config.get("rope_scaling") is None:
        ones = dict.fromkeys(("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 1)
        positions = config.get("max_position_embeddings")  # vLLM's longest sequence is factor x original positions
        config["rope_scaling"] = {**ones, "type": "yarn", "original_max_position_embeddings": positions}


def require_whole_folder(folder: Path, trusted: bool = True) -> None:
    """Raise ConfigError where a file of a model's settings or tokenizer is not whole, or is of transformers 5 alone.

    Unless `trusted` (recipe.trust_remote_code), also where the tokenizer is Python code of the folder.
    """
    if (snapshots := sorted(folder.glob("snapshots/*"))) and not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is a repository in the hub's cache; give a model's folder in it: {snapshots[-1]}")
    for path in sorted(path for pattern in _SMALL_FILES for path in folder.glob(pattern)):
        if fault := file_fault(path):
            raise ConfigError(f"{path} {fault}")
    path = folder / "tokenizer_config.json"
    tokenizer = _read_if_there(path)
    if tokenizer.get("tokenizer_class") == "TokenizersBackend" or isinstance(tokenizer.get(_TOKENS_OF_5), list):
        raise ConfigError(
            f"{path}: expected a tokenizer of transformers 4, found one that transformers 5 saved; in a copy of the "
            f"folder set tokenizer_class to PreTrainedTokenizerFast and rename {_TOKENS_OF_5}, if there, "
            "additional_special_tokens"
        )
    for file in (folder / "config.json", path, *sorted(folder.glob("*processor_config.json"))):
        if others := [kind for kind in _code_names(_read_if_there(file)) if not kind.startswith(_CODE_KINDS)]:
            raise ConfigError(
                f"{file}: auto_map names Python code for {', '.join(others)}, expected none, as this recipe reads text "
                "alone; remove these entries in a copy of the folder"
            )
    for name in tokenizer_code(folder):
        code = folder / f"{name.partition('.')[0]}.py"
        if not trusted:
            raise ConfigError(
                f"{folder}: the tokenizer is Python code, {code.name}; read it, then set recipe.trust_remote_code=true "
                "(in the file of `data build`: trust_remote_code=true), which runs it in every process of a run"
            )
        if not code.is_file():
            raise ConfigError(f"{folder} names {code.name} as the tokenizer's code, which is missing; download it too")


def tokenizer_code(folder: Path) -> list[str]:
    """Return FILE.CLASS of each class of the folder's tokenizer that is Python code of the folder.

    transformers reads them in config.json too if tokenizer_config.json has no tokenizer_class. Raise ConfigError for
    ID--FILE.CLASS: it would download this code from another repository.
    """
    settings = _read_if_there(folder / "tokenizer_config.json")
    named = [_code_names(settings).get(_TOKENIZER)]
    if settings.get("tokenizer_class") is None:
        named.append(_code_names(_read_if_there(folder / "config.json")).get(_TOKENIZER))
    found = [name for names in named for name in ([names] if isinstance(names, str) else names or ()) if name]
    for name in found:
        repository, mark, code = name.rpartition("--")
        if mark:
            file = f"{code.partition('.')[0]}.py"
            raise ConfigError(
                f"{folder}: auto_map names {name} as the tokenizer's code, expected a file of the folder; copy {file} "
                f"of {repository} into the folder and remove {repository}--"
            )
    return found


def _code_names(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return auto_map of a file's content: {kind: names of Python code}."""
    names = settings.get("auto_map")
    return names if isinstance(names, dict) else {_TOKENIZER: names}  # old transformers wrote the value alone


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object; ConfigError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        fault = file_fault(path) or f"cannot be read as JSON ({type(error).__name__}: {error}); copy it again"
        raise ConfigError(f"{path} {fault}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(content).__name__}; copy it again")
    return content


def config_mismatches(config: Mapping[str, Any], keys: Iterable[str] = REQUIRED_VALUES) -> str:
    """Return those of `keys` whose values differ from `REQUIRED_VALUES` in a config, as text; empty without any."""
    accepted = {key: (value,) for key, value in REQUIRED_VALUES.items()} | {"model_type": MODEL_TYPES}
    found = {key: config[key] for key in keys if config.get(key) not in (None, *accepted[key])}
    return ", ".join(f"{k} is {v!r}, expected {' or '.join(map(repr, accepted[k]))}" for k, v in found.items())


def edit_for_training(hf_config: Any) -> None:
    """Edit a transformers configuration in place, as `read_config` edits the file's content."""
    vars(hf_config).pop(QUANTIZATION, None)
    _rename_attributes(hf_config)
    if getattr(hf_config, MTP_LAYERS, 0):
        setattr(hf_config, MTP_LAYERS, 0)


def edit_for_vllm(hf_config: Any) -> Any:
    """Edit a configuration of the family in place and return it (vLLM's `hf_overrides`); others stay unchanged."""
    if hf_config.model_type in MODEL_TYPES:
        vars(hf_config).pop(QUANTIZATION, None)
        _rename_attributes(hf_config)
    return hf_config


def _rename_attributes(hf_config: Any) -> None:
    """Give a transformers configuration transformers 4's and DeepSeek-V3's names, with both of the rope's type."""
    _rename_new_keys(vars(hf_config), "HF config")
    rename_to_deepseek_v3(vars(hf_config))
    if "type" in (yarn := getattr(hf_config, "rope_scaling", None) or {}):
        hf_config.rope_scaling = {**yarn, "rope_type": yarn["type"]}
    if isinstance(hf_config.torch_dtype, str):
        import torch  # imported here, as only workers and engines have transformers' configurations

        hf_config.torch_dtype = getattr(torch, hf_config.torch_dtype)


def class_of_family(from_pretrained: Callable) -> Callable:
    """Wrap `AutoConfig.from_pretrained`: the family has transformers' DeepseekV3Config, and no code of the folder."""

    @functools.wraps(from_pretrained)
    def load(cls: type, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        from transformers import DeepseekV3Config, PretrainedConfig

        own = {**kwargs, "trust_remote_code": None, "name_or_path": pretrained_model_name_or_path}
        own.pop("code_revision", None)  # of AutoModel, as AutoConfig does; it would reach the model's constructor
        config, others = PretrainedConfig.get_config_dict(pretrained_model_name_or_path, **own)
        if config.get("model_type") in MODEL_TYPES:
            return DeepseekV3Config.from_dict(config, **others)
        return from_pretrained(cls, pretrained_model_name_or_path, **kwargs)

    return load


def reduce_layers(hf_config: Any, layers: int | None) -> None:
    """Reduce vLLM's configuration of a model folder to the first `layers` layers (None: all), in place.

    The folder may have tensors of the other layers: they count as layers of MTP, which vLLM's loader skips.
    """
    left_out = 0 if layers is None else hf_config.num_hidden_layers - layers
    if left_out > 0:
        hf_config.num_hidden_layers = layers
        setattr(hf_config, MTP_LAYERS, (getattr(hf_config, MTP_LAYERS, 0) or 0) + left_out)


def weight_files(folder: str | Path) -> set[str]:
    """Return the names of the safetensors files in a folder."""
    return {file.name for file in Path(folder).glob("*.safetensors")}


def safetensors_header(path: Path) -> Mapping[str, Any]:
    """Return {tensor: {dtype, shape, data_offsets}} of a safetensors file; ConfigError where the file is not whole."""
    try:
        with safe_open(path, "np"):  # checks sizes, offsets and the length of the file
            pass
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, SafetensorError) as error:
        fault = file_fault(path) or f"is not a whole safetensors file ({error}); download or write it again"
        raise ConfigError(f"{path} {fault}") from error
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
