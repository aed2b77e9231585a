"""DeepSeek-V3 weights in Megatron: parameter names, reading HF safetensors, loading into model chunks.

Names: Megatron has two spellings, that of its own modules ("local", tabulated in layout/sharding.py) and Transformer
Engine's, which fuses norms into the next projection and stacks experts. verl's weight converter knows the second only.
`parse_name` reads both, `te_name` turns the first into the second. Layer and expert numbers in Megatron names are local
to the pipeline chunk and to the expert-parallel rank.

Loading: verl 0.4.0 loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py), by
building the whole HF model on every rank. Here the model's own parameters say which layers and experts they are (uneven
pipelines and any expert placement included), the inventory says what HF calls them, and only their slices are read.

Megatron is imported inside functions: the resharder uses the names where Megatron must not be imported yet.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter, build_inventory
from verl_patches.layout.model_folder import INDEX, SCALE, SINGLE, refuse_weights
from verl_patches.layout.sharding import AXES, MEGATRON_NAMES

log = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV3ForCausalLM"
_EXAMPLES = 3
# (local spelling, Transformer Engine spelling), as regular expression and template of each other
_TO_TE = (
    (r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"{0}.{2}.weight{1}"),
    (r"(.*\.self_attention)\.q_layernorm\.weight", r"{0}.linear_q_up_proj.layer_norm_weight"),
    (r"(.*\.self_attention)\.kv_layernorm\.weight", r"{0}.linear_kv_up_proj.layer_norm_weight"),
)
_FROM_TE = (
    (r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)", r"{0}.local_experts.{2}.{1}.weight"),
    (r"(.*\.self_attention)\.linear_q_up_proj\.layer_norm_weight", r"{0}.q_layernorm.weight"),
    (r"(.*\.self_attention)\.linear_kv_up_proj\.layer_norm_weight", r"{0}.kv_layernorm.weight"),
    (r"(.*)\.mlp\.linear_fc1\.layer_norm_weight", r"{0}.pre_mlp_layernorm.weight"),  # dense layers
)


# ---- parameter names


class ParsedName(NamedTuple):
    """What a Megatron parameter is: inventory kinds in the order they are joined (gate, up), local layer and expert."""

    kinds: tuple[str, ...]
    layer: int | None
    expert: int | None


def te_name(name: str) -> str:
    """The name that Transformer Engine modules would give this parameter; names that are equal in both stay."""
    return _respell(name, _TO_TE)


def local_name(name: str) -> str:
    """The name that Megatron's own modules would give this parameter: the inverse of `te_name`."""
    return _respell(name, _FROM_TE)


def _respell(name: str, spellings: tuple[tuple[str, str], ...]) -> str:
    for pattern, template in spellings:
        match = re.fullmatch(pattern, name)
        if match:
            return template.format(*match.groups())
    return name


def parse_name(name: str) -> ParsedName:
    """What the parameter (or buffer) `name` of one GPTModel chunk is; either spelling, wrapper prefixes allowed.

    Raises ConfigError for a name that no DeepSeek-V3 parameter has.
    """
    found = match_name(local_name(without_wrappers(name)), _patterns())
    if found is None:
        raise ConfigError(
            f"Megatron parameter {name!r} is not one of DeepSeek-V3's: "
            "expected names as decoder.layers.0.mlp.router.weight; a grouped GEMM without Transformer Engine "
            "(weight1, weight2) is not supported here: set moe_grouped_gemm=False"
        )
    return found


def without_wrappers(name: str) -> str:
    """`name` without the prefixes ("module.") of DDP and Float16Module."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


NamePatterns = tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]


def name_patterns(names: Mapping[str, str]) -> NamePatterns:
    """(pattern, kinds) of each parameter, from kind -> name with {layer} and {expert}; kinds of one name are joined."""
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, template in names.items():
        kinds[template] = (*kinds.get(template, ()), kind)
    found = []
    for template, joined in kinds.items():
        text = re.escape(template)
        for number in ("layer", "expert"):
            text = text.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)")
        found.append((re.compile(text), joined))
    return tuple(found)


def match_name(name: str, patterns: NamePatterns) -> ParsedName | None:
    """The first of `patterns` (of `name_patterns`) that is `name`; None if none is."""
    for pattern, kinds in patterns:
        match = pattern.fullmatch(name)
        if match:
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            return ParsedName(kinds, numbers.get("layer"), numbers.get("expert"))
    return None


@functools.cache
def _patterns() -> NamePatterns:
    return name_patterns(MEGATRON_NAMES)


def te_names_for_verl(normalize_model_name):
    """Row provider: verl's `normalize_model_name` (verl/utils/model.py:208), its result in Transformer Engine spelling.

    verl's per_tensor_generator finds experts by ".mlp.experts.linear_fc" and its DeepSeek-V3 converter knows no other
    spelling, so parameters of Megatron's own modules must pass through here before both.
    """

    @functools.wraps(normalize_model_name)
    def normalize(name, *args, **kwargs):
        return te_name(normalize_model_name(name, *args, **kwargs))

    return normalize


# ---- reading a HF folder


class HFTensors:
    """The tensors of one HF folder, or slices of them, read one at a time. A context manager: files stay open inside.

    Raises ConfigError for a folder without safetensors, an index that names missing files, and unknown tensor names.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files = self._read_index()
        self._open = ExitStack()
        self._handles: dict[str, object] = {}

    def __enter__(self) -> HFTensors:
        return self

    def __exit__(self, *exc) -> None:
        self._open.close()
        self._handles.clear()

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
            missing = sorted({file for file in files.values() if not (self.folder / file).is_file()})
            if missing:
                raise ConfigError(f"{index}: {len(missing)} file(s) it names are missing, as {missing[0]}: copy them")
            return files
        if single.is_file():
            with safe_open(single, "pt") as handle:
                return dict.fromkeys(handle.keys(), SINGLE)
        raise ConfigError(f"{self.folder}: expected {INDEX} or {SINGLE}, found neither; give a safetensors folder")

    def check_names(self, expected: Iterable[str], num_layers: int) -> None:
        """ConfigError for weights in fp8, or names other than `expected`, multi-token prediction layers aside."""
        expected, found = set(expected), set(self._files)
        missing, extra = expected - found, found - expected
        extra = {name for name in extra if not _is_beyond(name, num_layers)}
        if any(name.endswith(SCALE) for name in extra):
            refuse_weights(self.folder)
        faults = [
            f"{len(names)} {what}, as {', '.join(sorted(names)[:_EXAMPLES])}"
            for what, names in (("missing", missing), ("not known to the config", extra))
            if names
        ]
        if faults:
            raise ConfigError(
                f"{self.folder}: expected the {len(expected)} tensors that config.json describes, "
                f"found {'; '.join(faults)}. "
                "The weights and config.json do not belong together, or a download is incomplete."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, axis: int | None = None, part: int = 0, parts: int = 1) -> torch.Tensor:
        """The tensor on the CPU in its stored dtype, or part `part` of `parts` equal ones along `axis` (0 or 1)."""
        tensor = self._slice(name)
        if axis is None or parts == 1:
            return tensor[:]
        size = tensor.get_shape()[axis]
        if size % parts:
            raise ConfigError(f"{name}: axis {axis} has size {size}, which {parts} ranks cannot share: change TP, ETP")
        start, stop = size // parts * part, size // parts * (part + 1)
        return tensor[start:stop] if axis == 0 else tensor[:, start:stop]

    def _slice(self, name: str):
        file = self._files.get(name)
        if file is None:
            raise ConfigError(f"{self.folder}: no tensor named {name!r}")
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(self.folder / file, "pt"))
        try:
            found = self._handles[file].get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.folder / file}: the index puts {name!r} here, but it is not: {error}") from error
        if found.get_dtype().startswith("F8_"):
            refuse_weights(self.folder)
        return found


def _is_beyond(name: str, num_layers: int) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers


# ---- loading into a model


class Source(NamedTuple):
    """Where one Megatron tensor comes from: HF tensors to be joined along axis 0, and this rank's part of each."""

    parameters: tuple[Parameter, ...]
    axis: int | None
    part: int
    parts: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the joined tensors before they are split over ranks."""
        return sum(p.shape[0] for p in self.parameters), *self.parameters[0].shape[1:]


# (folder's tensors, chunk, parameter name, inventory, the parameter's shape) -> its value
ReadParameter = Callable[[HFTensors, torch.nn.Module, str, Inventory, tuple[int, ...]], torch.Tensor]


def load_weights(
    folder: str | Path, chunks: Sequence[torch.nn.Module], read_parameter: ReadParameter | None = None
) -> int:
    """Fill the parameters and correction biases of `chunks` (GPTModel, wrapped or not) and return how many were set.

    Values are converted to each parameter's dtype; correction biases stay fp32, whatever a bf16 wrapper made of them.
    Needs Megatron's process groups. Raises ConfigError for tensors that are missing, unknown, of another shape, or fp8,
    and for parameters that no HF tensor is known for: the message names parameter, expected and found.
    `read_parameter` is for models with other names than Megatron's (mindspeed/weights.py).
    """
    from verl.utils.megatron_utils import unwrap_model  # not above: the row is applied while that module is half built

    read_parameter = read_parameter or _read_parameter
    inventory = build_inventory(Path(folder))
    count = 0
    with HFTensors(folder) as tensors, torch.no_grad():
        tensors.check_names((p.name for p in inventory.parameters), inventory.model.num_hidden_layers)
        for chunk in unwrap_model(list(chunks)):
            _keep_bias_fp32(chunk)
            for name, target in named_weights(chunk):
                target.copy_(read_parameter(tensors, chunk, name, inventory, tuple(target.shape)))
                count += 1
    log.info("loaded %d tensors from %s", count, folder)
    return count


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a GPTModel chunk that a checkpoint holds: parameters and correction biases."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def source_of(chunk: torch.nn.Module, name: str, inventory: Inventory) -> Source:
    """What the parameter `name` of a GPTModel chunk is made of on this rank. Raises ConfigError for an unknown name."""
    from megatron.core import parallel_state

    parsed = parse_name(name)
    axis = AXES[parsed.kinds[0]]
    if parsed.expert is not None:
        part = parallel_state.get_expert_tensor_parallel_rank()
        parts = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        part = parallel_state.get_tensor_model_parallel_rank()
        parts = parallel_state.get_tensor_model_parallel_world_size()
    layer = expert = None
    if parsed.layer is not None:
        block = chunk.decoder.layers[parsed.layer]
        layer = block.layer_number - 1  # Megatron counts from 1, over the whole model
        expert = None if parsed.expert is None else block.mlp.local_expert_indices[parsed.expert]
    return Source(hf_tensors_of(name, parsed.kinds, inventory, layer, expert), axis, part, parts)


def hf_tensors_of(
    name: str, kinds: tuple[str, ...], inventory: Inventory, layer: int | None, expert: int | None
) -> tuple[Parameter, ...]:
    """The HF tensors of `kinds`, in order, of a layer and expert of the whole model (None: outside of them).

    Raises ConfigError, with the Megatron parameter's `name`, where the inventory has none.
    """
    found = inventory.at(layer, expert)
    missing = [kind for kind in kinds if kind not in found]
    if missing:
        raise ConfigError(
            f"Megatron parameter {name!r} is {missing[0]} of layer {layer}, expert {expert}, "
            "which config.json's model does not have: the Megatron model was built from another config"
        )
    return tuple(found[kind] for kind in kinds)


def read_source(tensors: HFTensors, source: Source) -> torch.Tensor:
    """This rank's part of `source`, joined; ConfigError for a stored shape that is not config.json's."""
    for parameter in source.parameters:
        found = tensors.shape(parameter.name)
        if found != parameter.shape:
            raise ConfigError(
                f"{parameter.name}: expected shape {parameter.shape} (config.json), found {found} in {tensors.folder}"
            )
    pieces = [tensors.read(p.name, source.axis, source.part, source.parts) for p in source.parameters]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def check_shape(value: torch.Tensor, expected: tuple[int, ...], name: str, source: Source) -> torch.Tensor:
    """`value`, read from `source` for the parameter `name`; ConfigError unless it has the parameter's shape."""
    if tuple(value.shape) != expected:
        raise ConfigError(
            f"Megatron parameter {name!r}: expected shape {expected}, found {tuple(value.shape)} "
            f"for part {source.part} of {source.parts} of {', '.join(p.name for p in source.parameters)}: "
            "TP or ETP differs from the model's"
        )
    return value


def _read_parameter(tensors, chunk, name, inventory, expected) -> torch.Tensor:
    source = source_of(chunk, name, inventory)
    if source.whole_shape == expected:  # one part, or a module that is not split
        source = source._replace(axis=None)
    return check_shape(read_source(tensors, source), expected, name, source)


def _keep_bias_fp32(chunk: torch.nn.Module) -> None:
    """Undo what Float16Module did to the correction biases, before values are lost by it.

    Megatron does the same at each forward (moe/router.py:131), which is too late for a value that was loaded in bf16.
    """
    for module in chunk.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()


def load_deepseekv3(load_megatron_gptmodel_weights, load=load_weights):
    """Row provider for verl's `load_megatron_gptmodel_weights`: DeepSeek-V3 by `load`, other architectures by verl."""

    @functools.wraps(load_megatron_gptmodel_weights)
    def load_gpt_weights(config, model_config, parallel_model, params_dtype, is_value_model=False, *args, **kwargs):
        if ARCHITECTURE not in (model_config.architectures or ()):
            return load_megatron_gptmodel_weights(
                config, model_config, parallel_model, params_dtype, is_value_model, *args, **kwargs
            )
        if is_value_model:
            raise ConfigError("DeepSeek-V3 cannot be a value model: set algorithm.adv_estimator=grpo")
        from verl.utils.fs import copy_to_local

        return load(copy_to_local(config.model.path), parallel_model)

    return load_gpt_weights
