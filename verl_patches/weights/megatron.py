"""Find the weights in a Megatron checkpoint: which file holds which part, read without running its pickles.

    latest_checkpointed_iteration.txt                         the iteration's number, written last
    iter_0000001/mp_rank_TT[_PPP[_EEE]]/model_optim_rng.pt    one file for each place in Megatron's TP, PP and EP groups
    config.json, tokenizer.json, ...                          of the HF model; Megatron does not read them
    layout.txt                                                text of `parse_layout`; of other programs' files the user
                                                              writes it

A file is torch.save's zip of {"model": {parameter: tensor}, "checkpoint_version": 3.0, "iteration": 1}, with model0,
model1, ... of virtual stages. Names of folders follow `get_checkpoint_name` in megatron/training/checkpointing.py
(core_r0.8.0): PPP and EEE are in a name where there is more than one. With moe_tp_extend_ep MindSpeed's EP counts
groups of TP ranks: at TP4 EP8 a layout says ep=32, and the file TT, EEE holds chunk EEE * TP + TT of the experts.
torch.load(weights_only=True) reads the files that this repository writes.

Files written by MindSpeed-LLM's converter and by Megatron's training hold a defaultdict, arguments and generators. They
are read without running anything that a pickle names (`Unpickler`): tensors become places in the file, which
reader.py then reads.
"""

from __future__ import annotations

import argparse
import math
import pickle
import re
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.shared_files import file_fault
from verl_patches.weights.manifest import ITEM_BYTES, LAYOUT_FILE, TRACKER, StoredPart, TensorPart

MODEL_FILE, ITERATION_FOLDER = "model_optim_rng.pt", "iter_0000001"
_ZIP_HEADER = struct.Struct("<26xHH")  # of a record: lengths of its name and of its extra field
_MTP_PREFIX, _MTP_NORM, _EXTRA_STATE = "mtp_layers.", "final_layernorm.weight", "_extra_state"


# ---- which rank's parameters are in which file


def ranks_by_file(layout: ParallelLayout, library: str) -> dict[str, int]:
    """Return {file in an iteration's folder: the first rank whose parameters it holds}.

    Raises ConfigError for a layout that MindSpeed cannot have, and where two ranks with the same file hold different
    experts.
    """
    whole = library == "mindspeed" and layout.tp > 1 and layout.etp == 1
    fits = layout.ep % layout.tp == 0 if whole else layout.etp == layout.tp
    if library == "mindspeed" and not fits:
        raise ConfigError(
            f"layout {layout}: expected etp=1 and ep a multiple of tp (MindSpeed: whole experts), or etp equal to tp "
            f"(experts cut over TP), found tp={layout.tp}, ep={layout.ep}, etp={layout.etp}; change the layout"
        )
    found: dict[str, tuple[int, tuple[int, int]]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        ep, count = (at.ep // layout.tp, layout.ep // layout.tp) if whole else (at.ep, layout.ep)
        name = f"mp_rank_{at.tp:02d}"
        name += f"_{at.pp:03d}" if layout.pp > 1 else ""
        name += f"_{ep:03d}" if count > 1 else ""
        if found.setdefault(f"{name}/{MODEL_FILE}", (rank, (at.etp, at.ep)))[1] != (at.etp, at.ep):
            raise ConfigError(
                f"layout {layout}: ranks with different experts would write the same file of Megatron's checkpoint, "
                f"{name}; expected etp 1 or {layout.tp} (tp), found {layout.etp}"
            )
    return {name: rank for name, (rank, _) in found.items()}


# ---- what a file holds, without running it


class SavedTensor(NamedTuple):
    """Locate a tensor of a pickle: elements from `offset` on of the zip's record `record`."""

    record: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class InertObject:
    """Stand in for an object of any class that is not built: it accepts all a pickle gives it, and does nothing."""

    def __init__(self, *_: Any, **__: Any):
        """Accept the arguments of any class."""

    def ignore(self, *_: Any, **__: Any) -> InertObject:
        """Accept a state, or items of a list, a set or a mapping, and stand in for the result of a call."""
        return self

    __call__ = __setstate__ = __setitem__ = append = extend = add = ignore


_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "BFloat16": "BF16", "Half": "F16", "Float": "F32", "Double": "F64", "Long": "I64", "Int": "I32",
        "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL",
    }.items()
}  # fmt: skip


class Unpickler(pickle.Unpickler):
    """Build dict, OrderedDict, defaultdict and argparse.Namespace, and a SavedTensor for each tensor.

    Every other class or function that the pickle names becomes InertObject, so that it is neither imported nor called.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that stands in for `module`.`name`."""
        if module == "torch" and name in _STORAGES:
            return type(name, (InertObject,), {"dtype": _STORAGES[name]})
        if (module, name) == ("argparse", "Namespace"):
            return type(name, (argparse.Namespace,), {})  # a new class, because a pickle may set its attributes
        built = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("collections", "OrderedDict"): OrderedDict,
            ("collections", "defaultdict"): defaultdict,
            ("builtins", "dict"): dict,
        }
        return built.get((module, name)) or type(name, (InertObject,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Return (record, dtype) of a storage."""
        _, storage, key, *_ = pid
        return f"data/{key}", getattr(storage, "dtype", "")

    @staticmethod
    def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> SavedTensor:
        record, dtype = storage
        return SavedTensor(record, dtype, offset, tuple(shape), tuple(stride))

    @staticmethod
    def _parameter(tensor: Any, *_: Any) -> Any:
        return tensor


class RankFile(NamedTuple):
    """Hold the contents of a file: tensors of each model chunk, and where records begin, by name."""

    chunks: list[dict[str, SavedTensor]]
    records: dict[str, int]


def read_rank_file(path: Path) -> RankFile:
    """Return the contents of a file; raises ConfigError if it is not whole, or a model's entry is not a tensor."""
    try:
        with zipfile.ZipFile(path) as file:
            records = {info.filename.partition("/")[2]: info for info in file.infolist()}
            head = records["data.pkl"]
            if any(info.compress_type for info in records.values()):
                raise ValueError("compressed records, which torch.save does not write")
            with file.open(head) as pickled:
                state = dict(Unpickler(pickled).load())
        with path.open("rb", buffering=0) as file:
            places = {name: _data_offset(file, info.header_offset) for name, info in records.items()}
    except Exception as error:  # a pickle may raise anything
        found = f"is not a complete file of torch.save ({type(error).__name__}: {error}); copy or convert it again"
        raise ConfigError(f"{path} {file_fault(path) or found}") from error
    keys = ["model"] if "model" in state else [f"model{n}" for n in range(len(state)) if f"model{n}" in state]
    if not keys:
        raise ConfigError(f"{path}: expected key model, or model0, model1, ..., found {', '.join(map(str, state))}")
    chunks = []
    for key in keys:
        chunk = state.pop(key)
        held = chunk if isinstance(chunk, dict) else {"": chunk}
        chunks.append({name: tensor for name, tensor in held.items() if not str(name).endswith(_EXTRA_STATE)})
        for name, tensor in chunks[-1].items():
            if not isinstance(tensor, SavedTensor):
                raise ConfigError(f"{path}: {key}: {name!r}: expected a tensor, found {type(tensor).__name__}")
            _check_tensor(path, name, tensor, records)
    return RankFile(chunks, places)


def _data_offset(file: BinaryIO, header: int) -> int:
    """Return the offset of the data of a zip's record, by the lengths of name and extra field in its own header."""
    file.seek(header)
    name, more = _ZIP_HEADER.unpack(file.read(_ZIP_HEADER.size))
    return header + _ZIP_HEADER.size + name + more


def _check_tensor(path: Path, name: str, tensor: SavedTensor, records: Mapping[str, zipfile.ZipInfo]) -> None:
    """Raise ConfigError unless the tensor is contiguous, and all of it is in its record."""
    contiguous = [math.prod(tensor.shape[n + 1 :]) for n in range(len(tensor.shape))]
    there = records[tensor.record].file_size if tensor.record in records else 0
    needed = (tensor.offset + math.prod(tensor.shape)) * ITEM_BYTES.get(tensor.dtype, 0)
    if list(tensor.stride) != contiguous or not 0 < needed <= there:
        raise ConfigError(
            f"{path}: {name}: expected a contiguous {tensor.dtype} {tensor.shape} in the first {needed} bytes of its "
            f"record, found strides {tensor.stride} and a record of {there} bytes; save the file again with contiguous "
            "tensors, or copy it again if the record is too short"
        )


# ---- a folder


def read_folder(folder: Path, inventory: Inventory) -> tuple[list[TensorPart], tuple[str, ...]]:
    """Return (the parts of HF tensors in a folder, by reading the heads of all its files, names of MTP's parameters).

    Raises ConfigError as open_source does.
    """
    from verl_patches.reshard.train_tensors import train_tensors_from_native  # imports torch

    place = _iteration_folder(folder)
    files = {
        str(path.relative_to(place)): read_rank_file(path) for path in sorted(place.glob(f"mp_rank_*/{MODEL_FILE}"))
    }
    if not files:
        raise ConfigError(f"{place}: expected mp_rank_TT.../{MODEL_FILE}, found none; copy or convert the folder again")
    names = [name for file in files.values() for chunk in file.chunks for name in chunk]
    library = "mindspeed" if any("linear_qkv" in name for name in names) else "megatron-local"
    if not (folder / LAYOUT_FILE).is_file():
        raise ConfigError(
            f"{folder / LAYOUT_FILE}: expected the layout of the folder's files, found no file; write it, such as "
            '"tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7" (etp1: whole experts, as with --moe-tp-extend-ep)'
        )
    layout = parse_layout((folder / LAYOUT_FILE).read_text())
    expected = ranks_by_file(layout, library)
    for what, unlike in (("missing", expected.keys() - files), (f"not of layout {layout}", files.keys() - expected)):
        if unlike:
            raise ConfigError(f"{place}: {len(unlike)} files are {what}, such as {min(unlike)}; copy or convert again")
    found: dict[Any, TensorPart] = {}  # keyed by region, because replicas of a tensor are in many files
    left_out: set[str] = set()
    for name, rank in expected.items():
        chunks = [_model_tensors(chunk, left_out) for chunk in files[name].chunks]
        shaped = [{n: _meta_tensor(n, saved, inventory, library) for n, saved in chunk.items()} for chunk in chunks]
        for held in train_tensors_from_native(shaped, inventory, layout, rank, library).values():
            if held.region not in found:
                saved = chunks[held.chunk][held.parameter]
                where = f"{place.name}/{name}", files[name].records[saved.record]
                found[held.region] = TensorPart(_stored_part(*where, saved, held), saved.dtype, held.shape)
    return list(found.values()), tuple(sorted(left_out))


def _iteration_folder(folder: Path) -> Path:
    """Return the folder of the iteration that the tracker names."""
    text = (folder / TRACKER).read_text(errors="replace").strip()
    if not re.fullmatch(r"\d{1,9}|release", text):
        raise ConfigError(f"{folder / TRACKER}: expected the number of an iteration, found {text!r:.40}; copy it again")
    return folder / (text if text == "release" else f"iter_{int(text):07d}")


def _model_tensors(chunk: Mapping[str, SavedTensor], left_out: set[str]) -> dict[str, SavedTensor]:
    """Return the tensors of a chunk without those of MTP, with layers numbered without gaps.

    MindSpeed leaves numbers out (noop_layers), and names the last norm differently beside layers of MTP.
    """
    left_out |= {name for name in chunk if name.startswith(_MTP_PREFIX)}
    chunk = {name: tensor for name, tensor in chunk.items() if name not in left_out}
    if _MTP_NORM in chunk:
        chunk[f"decoder.{_MTP_NORM}"] = chunk.pop(_MTP_NORM)
    layers = {int(match[1]) for name in chunk if (match := re.match(r"decoder\.layers\.(\d+)\.", name))}
    numbers = {number: place for place, number in enumerate(sorted(layers))}
    return {
        re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(numbers[int(match[0])]), name): tensor
        for name, tensor in chunk.items()
    }


def _meta_tensor(name: str, saved: SavedTensor, inventory: Inventory, library: str) -> Any:
    """Return a meta tensor of the saved shape, in the dtype that the model has for it."""
    import torch

    from verl_patches.reshard.parameters import parse_name

    bias = "router_bias" in parse_name(name, library).kinds
    dtype = torch.float32 if bias else getattr(torch, inventory.model.torch_dtype)
    return torch.empty(saved.shape, dtype=dtype, device="meta")


def _stored_part(file: str, start: int, saved: SavedTensor, held: Any) -> StoredPart:
    """Return where the bytes of `held` are: row after row, or column after column of a stack of experts."""
    view, item = held.tensor, ITEM_BYTES[saved.dtype]
    place = saved.offset + view.storage_offset()
    if view.dim() == 1 or view.stride(1) == 1 or view.shape[1] == 1:
        return StoredPart(file, start + place * item, held.region)
    stride = view.stride(1)
    column_start = view.storage_offset() % stride
    at = start + (place - column_start) * item
    return StoredPart(file, at, held.region, column_stride=stride, column_start=column_start)


def crc_problems(folder: Path) -> Iterator[str]:
    """Yield the first record of each file whose bytes do not have the CRC-32 that the zip records."""
    for path in sorted(_iteration_folder(folder).glob(f"mp_rank_*/{MODEL_FILE}")):
        with zipfile.ZipFile(path) as file:
            if bad := file.testzip():
                yield f"{path.relative_to(folder)}: expected the recorded CRC-32 of {bad}, found another; copy it again"
