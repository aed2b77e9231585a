"""Read single tensors, or slices of them, from a HF folder of safetensors files without holding more than one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import INDEX, SCALE, SINGLE, fp8_fault

_EXAMPLES = 3


class HFTensors:
    """The tensors of one HF folder, read from disk when asked for. Use as a context manager; files stay open inside.

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
        if any(name.endswith(SCALE) for name in extra) and (fault := fp8_fault(self.folder)):
            raise ConfigError(fault)
        faults = [
            f"{len(names)} {what}, as {', '.join(sorted(names)[:_EXAMPLES])}"
            for what, names in (("missing", missing), ("not known to the config", extra))
            if names
        ]
        if faults:
            raise ConfigError(
                f"{self.folder}: expected the {len(expected)} tensors that config.json asks for, "
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
            raise ConfigError(fp8_fault(self.folder))
        return found


def _is_beyond(name: str, num_layers: int) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers
