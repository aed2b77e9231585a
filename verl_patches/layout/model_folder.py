"""What a run reads of an HF model folder: config.json as training and as vLLM need it, and the dtype of its weights.

DeepSeek publishes V3 and R1 with fp8 weights and one layer for multi-token prediction (MTP); config.json says so in
`quantization_config` and `num_nextn_predict_layers`. Conversion to bf16 leaves config.json as it is. This recipe trains
and serves bf16 or fp32 weights without MTP layers, so both frameworks read an edited config.json; the edit is made in
memory, in each process, because the run's folder need not be shared between nodes.

    training   no quantization_config, num_nextn_predict_layers 0: verl's converter and MindSpeed-LLM refuse others
    vLLM       no quantization_config: vllm-ascend refuses the method (vllm_ascend/platform.py:52), vLLM would build fp8
               layers. num_nextn_predict_layers stays: vLLM 0.9.1 builds MTP layers only with a speculative_config and
               reads it only to pass over their tensors (deepseek_v2.py:763); with 0 its loader ends in a KeyError

The key is deleted, not set to None: transformers 4.51 to 4.52 call `.to_dict()` on it when a configuration is printed
(configuration_utils.py:845), which verl does on rank 0. No torch here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError

QUANTIZATION, MTP_LAYERS = "quantization_config", "num_nextn_predict_layers"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SCALE = "weight_scale_inv"  # ends the names of fp8 weights' scales
_MODEL_TYPE = "deepseek_v3"
_LONGEST_HEADER = 100_000_000  # bytes, safetensors' own limit


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json (the file, or the folder that holds it) as training reads it; ConfigError where there is none."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected a HF model folder or its config.json")
    config = read_json_object(path)
    config.pop(QUANTIZATION, None)
    return {**config, MTP_LAYERS: 0} if config.get(MTP_LAYERS) else config


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object; ConfigError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({type(error).__name__}: {error}); copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(content).__name__}; copy it again")
    return content


def for_training(hf_config: Any) -> None:
    """Edit a transformers configuration in place, as `read_config` edits the file's content."""
    vars(hf_config).pop(QUANTIZATION, None)
    if getattr(hf_config, MTP_LAYERS, 0):
        setattr(hf_config, MTP_LAYERS, 0)


def for_vllm(hf_config: Any) -> Any:
    """vLLM's `hf_overrides`: the configuration of a DeepSeek-V3, edited in place; another model's as it is."""
    if hf_config.model_type == _MODEL_TYPE:
        vars(hf_config).pop(QUANTIZATION, None)
    return hf_config


def weight_files(folder: str | Path) -> set[str]:
    """Names of the safetensors files in a folder."""
    return {file.name for file in Path(folder).glob("*.safetensors")}


def refuse_weights(folder: str | Path) -> None:
    """ConfigError where a safetensors file of the folder is missing or cut off, or holds tensors in fp8.

    Read from the headers of the files, whatever config.json says. A folder without weights is accepted.
    """
    names = sorted(name for name, dtype in _stored_dtypes(Path(folder)) if dtype.startswith("F8_"))
    if names:
        raise ConfigError(
            f"{folder}: {len(names)} tensors are stored in fp8, as {names[0]}; expected bf16, in which this recipe "
            f"trains. Run `python -m verl_patches weights convert {folder} BF16 --hf` and set "
            "actor_rollout_ref.model.path to BF16"
        )


def _stored_dtypes(folder: Path) -> Iterator[tuple[str, str]]:
    """(tensor, safetensors' name of its dtype) of the files that the index names, or of all where there is none."""
    index, files = folder / INDEX, weight_files(folder)
    if index.is_file() and files:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index}: expected weight_map, {{tensor: file}}, found {weight_map!r}; copy it again")
        named = {str(name) for name in weight_map.values()}
        if absent := sorted(named - files):
            raise ConfigError(
                f"{folder}: {len(absent)} of {len(named)} files named in {INDEX} are missing, as {absent[0]}; "
                "download them"
            )
        files = named
    for file in sorted(files):
        yield from ((name, tensor["dtype"]) for name, tensor in safetensors_header(folder / file).items())


def safetensors_header(path: Path) -> Mapping[str, Any]:
    """{tensor: {dtype, shape, data_offsets}} of a safetensors file; ConfigError where the file is not whole.

    The format: 8 bytes with the header's length, the header (JSON), the tensors' bytes.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            header = json.loads(file.read(length)) if 0 < length <= _LONGEST_HEADER else None
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        size = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if not all(isinstance(tensor["dtype"], str) for tensor in tensors.values()):
            raise ValueError("a dtype is no text")
        found = path.stat().st_size
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a whole safetensors file (its header cannot be read); download or record it again"
        ) from error
    if found != size:
        raise ConfigError(
            f"{path}: not a whole safetensors file ({found} bytes, expected {size}); download or record it again"
        )
    return tensors
