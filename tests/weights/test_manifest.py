"""The format of sharded weights: what is written is read back, and no state of a folder looks complete but one."""

import errno
import json
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import read_model_shape
from verl_patches.model.tiny import tiny_config
from verl_patches.reshard.region import Region
from verl_patches.weights import manifest as m
from verl_patches.weights import writer
from verl_patches.weights.reader import DTYPES, tensor_bytes

W = torch.arange(48, dtype=torch.float32).view(8, 6)
BIAS = torch.arange(5, dtype=torch.float32)
COLUMNS = torch.arange(24).view(4, 6).bfloat16()
MODEL = read_model_shape(tiny_config())


def entry(tensor, name, axis=0, start=0, whole=None, **more):
    region = Region(name, axis, start, start + tensor.shape[axis])
    return m.TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape), region, whole or tuple(tensor.shape), **more)


FILES = {
    "a.safetensors": [
        (entry(W[:3], "w", whole=(8, 6)), W[:3]),
        (entry(COLUMNS[:, :2], "c", 1, 0, (4, 6)), COLUMNS[:, :2]),
    ],
    "b.safetensors": [
        (entry(W[3:], "w", start=3, whole=(8, 6)), W[3:]),
        (entry(BIAS, "bias"), BIAS),
        (m.TensorEntry("w.m", "F32", (7,), Region("w", 0, 3, 8), (8, 6), "exp_avg", 4), W[3:].reshape(-1)[4:11]),
        (entry(COLUMNS[:, 2:], "c", 1, 2, (4, 6)), COLUMNS[:, 2:]),
    ],
}
EMPTY = m.Manifest(m.CHECKPOINT, MODEL, "tp2 @2", "keep", "id", (*FILES, "notes.txt"), facts={"step": 3})


def write(folder, name, pieces=1):
    tensors = FILES.get(name, [])
    with writer.FileWriter(folder, name, [entry for entry, _ in tensors]) as file:
        for data in [tensor_bytes(tensor) for _, tensor in tensors] or [b"some text"]:
            for part in range(pieces):
                file.write(data[len(data) * part // pieces : len(data) * (part + 1) // pieces])
        return file.finish()


def written(folder):
    writer.begin(folder, EMPTY)
    for number, name in enumerate(EMPTY.expected):
        write(folder, name, pieces=number + 1)
    return writer.complete(folder)


def test_what_is_written_is_read_back(tmp_path):
    folder = tmp_path / "new" / "folder"
    manifest = written(folder)
    assert manifest == m.read_manifest(folder) and manifest.complete and manifest.facts == {"step": 3}
    assert sorted(p.name for p in folder.iterdir()) == ["a.safetensors", "b.safetensors", "manifest.json", "notes.txt"]
    assert m.folder_problems(folder, manifest) == []
    with safe_open(folder / "b.safetensors", "pt") as plain:  # any reader of safetensors
        assert torch.equal(plain.get_tensor("w"), W[3:]) and plain.metadata() == {"format": "pt"}


def test_a_folder_is_complete_only_when_every_file_is_recorded(tmp_path):
    writer.begin(tmp_path, EMPTY)
    first = write(tmp_path, "a.safetensors")
    assert writer.complete(tmp_path) is None
    with pytest.raises(ConfigError, match="not complete .1 of 3 files written."):
        m.read_manifest(tmp_path)
    assert writer.begin(tmp_path, EMPTY) == {"a.safetensors": first}  # goes on
    with pytest.raises(RuntimeError, match="stop"), writer.FileWriter(tmp_path, "notes.txt") as file:
        file.write(b"some")
        raise RuntimeError("stop")
    assert not list(tmp_path.glob("notes.txt*"))
    write(tmp_path, "b.safetensors"), write(tmp_path, "notes.txt")
    manifest = writer.complete(tmp_path)
    assert manifest.complete and writer.complete(tmp_path) == manifest


def test_every_kind_of_damage_is_named(tmp_path):
    manifest = written(tmp_path)
    path = tmp_path / "b.safetensors"
    whole = path.read_bytes()

    def problems():
        return [
            (p.file, p.tensor, p.expected.split()[0], p.found.split()[0]) for p in m.folder_problems(tmp_path, manifest)
        ]

    end = len(whole)
    for entry, _ in FILES["b.safetensors"][::-1]:
        start = end - entry.size_bytes
        for at in (start, end - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            (tensor, file) = problems()
            assert tensor[:3] == ("b.safetensors", entry.key, "sha256"), (at, tensor)
            assert file == ("b.safetensors", "", "sha256", "sha256")
        end = start
    path.write_bytes(whole.replace(b'"bias"', b'"biaz"'))
    assert problems()[0][:2] == ("b.safetensors", "") and "header" in str(m.folder_problems(tmp_path, manifest)[0])
    with pytest.raises(ConfigError, match="bias: expected .*F32.*found no such tensor"):
        m.check_headers(tmp_path, manifest)
    path.write_bytes(whole[:-1])
    assert problems() == [("b.safetensors", "", str(len(whole)), str(len(whole) - 1))]
    path.unlink()
    (tmp_path / "extra.safetensors").touch()
    assert [p[:2] for p in problems()] == [("b.safetensors", ""), ("extra.safetensors", "")]
    text = (tmp_path / m.MANIFEST).read_text()
    for damaged in (text.replace('"version": 2', '"version": 1'), text[: len(text) // 2]):
        (tmp_path / m.MANIFEST).write_text(damaged)
        with pytest.raises(ConfigError, match=m.MANIFEST):
            m.read_manifest(tmp_path)


EDITS = {
    "facts": lambda found: found["facts"].update(step=4),
    "a file left out": lambda found: found["files"].pop(),
    "a tensor's place": lambda found: found["files"][1]["tensors"][0].update(start=0, stop=5),
    "no digest": lambda found: found.pop("digest"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_manifest_covers_itself(tmp_path, edit):
    written(tmp_path)
    path = tmp_path / m.MANIFEST
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found, sort_keys=True))  # control: the same content
    m.read_manifest(tmp_path)
    edit(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=f"{m.MANIFEST}: its digest is"):
        m.read_manifest(tmp_path)


def test_keys_of_other_types_are_read_back_as_they_are_hashed(tmp_path):
    manifest = replace(written(tmp_path), facts={"settings": {"data.more": [{1: 2, 10: 3, 2: 4}]}})
    (tmp_path / m.MANIFEST).write_text(m.to_json(manifest))
    assert m.read_manifest(tmp_path).facts == {"settings": {"data.more": [{"1": 2, "10": 3, "2": 4}]}}


def test_a_writer_refuses_too_many_too_few_doubled_and_unaligned_bytes(tmp_path):
    writer.begin(tmp_path, EMPTY)
    tensors = [entry(BIAS, "bias")]
    with (
        pytest.raises(RecipeError, match="4 bytes are missing, from bias on"),
        writer.FileWriter(tmp_path, "x", tensors) as f,
    ):
        f.write(bytes(16))
        f.finish()
    with pytest.raises(RecipeError, match="1 bytes more"), writer.FileWriter(tmp_path, "x", tensors) as f:
        f.write(bytes(21))
        f.finish()
    with pytest.raises(ConfigError, match="given twice"), writer.FileWriter(tmp_path, "x", tensors * 2):
        pass
    odd = [entry(torch.ones(3).bfloat16(), "odd"), *tensors]
    with pytest.raises(ConfigError, match="not aligned"), writer.FileWriter(tmp_path, "x", odd):
        pass
    assert m.in_data_order(odd) == odd[::-1]
    with (
        writer.FileWriter(tmp_path, "x", tensors),
        pytest.raises(RecipeError, match="another process writes this file"),
    ):
        writer.FileWriter(tmp_path, "x", tensors).__enter__()
    assert not list(tmp_path.glob("x*"))


def test_files_are_durable_before_they_have_their_names(tmp_path, monkeypatch):
    calls = []

    def seen(name, of):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given: calls.append((name, of(given))) or function(*given))

    seen("fsync", lambda given: os.path.basename(os.readlink(f"/proc/self/fd/{given[0]}")))
    seen("replace", lambda given: os.path.basename(given[1]))
    writer.begin(tmp_path, EMPTY)
    calls.clear()
    write(tmp_path, "notes.txt")
    assert calls == [("fsync", "notes.txt.partial"), ("replace", "notes.txt"), ("replace", "notes.txt.json")]
    write(tmp_path, "a.safetensors"), write(tmp_path, "b.safetensors")
    calls.clear()
    writer.complete(tmp_path)
    (first, temporary, named, last), folder = calls, ("fsync", tmp_path.name)
    assert first == last == folder and named == ("replace", m.MANIFEST) and temporary[1].startswith(m.MANIFEST)


def test_an_entry_that_a_loss_of_power_emptied_only_costs_its_file(tmp_path):
    writer.begin(tmp_path, EMPTY)
    for name in EMPTY.expected:
        write(tmp_path, name)
    (tmp_path / m.ENTRIES / "notes.txt.json").write_text("")
    with pytest.raises(ConfigError, match="notes.txt.json: cannot be read"):
        writer.complete(tmp_path)
    assert writer.begin(tmp_path, EMPTY).keys() == {"a.safetensors", "b.safetensors"}
    write(tmp_path, "notes.txt")
    assert writer.complete(tmp_path).complete


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_leaves_no_file(tmp_path, error):
    writer.begin(tmp_path, EMPTY)
    with pytest.raises(RecipeError, match="notes.txt could not be written: .*finished files are kept"):
        with writer.FileWriter(tmp_path, "notes.txt") as file:
            full = mock.Mock(side_effect=OSError(error, os.strerror(error)))
            file._file = mock.Mock(wraps=file._file, write=full)
            file.write(b"text")
    assert not list(tmp_path.glob("notes.txt*")) and writer.complete(tmp_path) is None
