"""Read tensors of a folder of sharded weights (manifest.py): whole ones or regions, joined from the files' parts.

Files are memory-mapped by safetensors; only the bytes of the region are read.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.reshard.region import Region, cover, overlap
from verl_patches.weights.manifest import WEIGHT, Manifest, TensorEntry, check_headers, read_manifest


class ShardReader:
    """The tensors of one complete folder. A context manager: files stay open inside.

    Raises ConfigError for a folder that is not complete, and for files that are missing, cut off or not the manifest's.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(folder)
        check_headers(folder, self.manifest)
        self._held: dict[tuple[str, str], list[tuple[str, TensorEntry]]] = {}
        for file in self.manifest.files:
            for entry in file.tensors:
                self._held.setdefault((entry.role, entry.region.name), []).append((file.name, entry))
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.close()
        self._handles.clear()

    def names(self, role: str = WEIGHT) -> list[str]:
        """Names of the complete tensors that have parts of this role."""
        return [name for held_role, name in self._held if held_role == role]

    def entries(self, name: str, role: str = WEIGHT) -> list[tuple[str, TensorEntry]]:
        """(file, entry) of each part of the tensor `name`; ConfigError where there is none."""
        if (role, name) not in self._held:
            raise ConfigError(f"{self.folder}: holds no {role} of {name!r}")
        return self._held[role, name]

    def shape(self, name: str, role: str = WEIGHT) -> tuple[int, ...]:
        """Shape of the complete tensor."""
        return self.entries(name, role)[0][1].whole

    def read_entry(self, file: str, key: str) -> torch.Tensor:
        """The tensor `key` of one file, as it is stored."""
        return self._handle(file).get_tensor(key)

    def read(self, name: str, region: Region | None = None, role: str = WEIGHT) -> torch.Tensor:
        """The complete tensor, or one region of it, in its stored dtype, on the CPU.

        Raises ConfigError where parts are missing, or are flat ranges, which only `read_entry` reads.
        """
        held = self.entries(name, role)
        if any(entry.flat is not None for _, entry in held):
            raise ConfigError(f"{self.folder}: {role} of {name} is stored in flat ranges; read them one by one")
        whole = held[0][1].whole
        region = region or Region(name, 0, 0, whole[0])
        missing, _ = cover(region, (entry.region for _, entry in held), whole)
        if missing:
            raise ConfigError(f"{self.folder}: {missing[0]} ({role}) is in no file")
        pieces = [(overlap(region, entry.region, whole), file, entry) for file, entry in held]
        pieces = sorted((piece for piece in pieces if piece[0] is not None), key=lambda piece: piece[0][1:3])
        if len(pieces) == 1:
            return self._part(*pieces[0])
        first = pieces[0][0]
        out = torch.empty(region.shape_in(whole), dtype=TORCH_DTYPES[held[0][1].dtype])
        base = region.along(first.axis, whole).start
        for part, file, entry in pieces:
            out.narrow(part.axis, part.start - base, part.rows).copy_(self._part(part, file, entry))
        return out

    def _part(self, part: Region, file: str, entry: TensorEntry) -> torch.Tensor:
        """The rows or columns of `part` in one stored tensor, whose region contains it."""
        held = entry.region.along(part.axis, entry.whole)
        start, stop = part.start - held.start, part.stop - held.start
        stored = self._handle(file).get_slice(entry.key)
        return stored[start:stop] if part.axis == 0 else stored[:, start:stop]

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(self.folder / file, "pt"))
        return self._handles[file]


TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}  # torch's dtype -> safetensors' name


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor as `FileWriter.write` takes them; a view if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def require_finite(value: torch.Tensor, name: str) -> None:
    """RecipeError where a floating tensor holds NaN or infinity. A sum is finite only if all is, and costs one read."""
    if value.sum(dtype=torch.float32).isfinite() or value.isfinite().all():  # the sum alone may be too large
        return
    raise RecipeError(
        f"{name}: holds NaN or infinity: the weights are damaged, or the run that wrote them was; download the folder "
        "again, or take an older checkpoint"
    )
