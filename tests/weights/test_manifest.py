"""Test the format of checkpoints: they are read back as written, and only one state of a folder looks complete."""

import errno
import json
import os
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.heartbeat.heartbeat import current_heartbeat
from verl_patches.layout.inventory import read_model_shape
from verl_patches.model.tiny import tiny_config
from verl_patches.reshard.region import Region
from verl_patches.weights import manifest as m
from verl_patches.weights import writer
from verl_patches.weights.reader import DTYPE_NAMES, tensor_bytes

W = torch.arange(48, dtype=torch.float32).view(8, 6)
BIAS = torch.arange(5, dtype=torch.float32)
COLUMNS = torch.arange(24).view(4, 6).bfloat16()
MODEL = read_model_shape(tiny_config())


def entry(tensor, name, axis=0, start=0, whole=None, **more):
    region = Region(name, axis, start, start + tensor.shape[axis])
    return m.TensorEntry(
        name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), region, whole or tuple(tensor.shape), **more
    )


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
MANIFEST = m.Manifest(MODEL, "tp2 @2", "keep", "id", (*FILES, "notes.txt"), facts={"step": 3})


def write(folder, name, pieces=1):
    """Write a file, each of its tensors in so many buffers."""
    if name not in FILES:
        return writer.write_bytes(folder, name, b"some text")
    tensors = {entry.key: (entry, tensor_bytes(tensor)) for entry, tensor in FILES[name]}

    def contents(entry):
        data = tensors[entry.key][1]
        cuts = [len(data) * n // pieces for n in range(pieces + 1)]
        return [data[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]

    return writer.write_tensors(folder, name, [entry for entry, _ in tensors.values()], contents)


def write_checkpoint(folder):
    for number, name in enumerate(MANIFEST.file_names):
        write(folder, name, pieces=number + 1)
    return writer.complete_folder(folder, MANIFEST)


def test_what_is_written_is_read_back(tmp_path):
    manifest = write_checkpoint(tmp_path)
    assert manifest == m.read_manifest(tmp_path) and manifest.facts == {"step": 3}
    names = ["a.safetensors", "b.safetensors", "manifest.json", "notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert m.folder_problems(tmp_path, manifest) == []
    with safe_open(tmp_path / "b.safetensors", "pt") as plain:  # safetensors' own reader
        assert torch.equal(plain.get_tensor("w"), W[3:]) and plain.metadata() == {"format": "pt"}


def test_written_bytes_are_counted_once_they_are_on_the_disk(tmp_path, monkeypatch):
    """Stand in for a slow disk by a hook before each flush, which sees what the heartbeat has counted by then."""
    counted, sync, beats = [], os.fsync, current_heartbeat()
    before = beats._beat.disk_bytes

    def slow_disk(handle):
        counted.append(beats._beat.disk_bytes - before)
        sync(handle)

    monkeypatch.setattr(writer, "SYNC_BYTES", 64)
    monkeypatch.setattr(writer.os, "fsync", slow_disk)
    entry = m.whole_entry("w", "F32", (100,))
    size = writer.write_tensors(tmp_path, "w", [entry], lambda entry: [bytes(399), bytes(1)]).size_bytes
    grown = [later - each for each, later in zip(counted, counted[1:], strict=False)]
    assert counted[0] == 0 and len(grown) > 3 and all(64 <= each < 128 for each in grown), counted
    assert beats._beat.disk_bytes - before == size and beats._beat.disk_at_s > 0


def test_a_folder_is_complete_only_when_every_file_is_recorded(tmp_path):
    write(tmp_path, "a.safetensors")
    assert writer.complete_folder(tmp_path, MANIFEST) is None and not m.has_manifest(tmp_path)
    write(tmp_path, "b.safetensors"), write(tmp_path, "notes.txt")
    assert writer.complete_folder(tmp_path, MANIFEST) == m.read_manifest(tmp_path)


def test_every_kind_of_damage_is_named(tmp_path):
    manifest = write_checkpoint(tmp_path)
    path = tmp_path / "b.safetensors"
    whole, end = path.read_bytes(), path.stat().st_size
    for each, _ in FILES["b.safetensors"][::-1]:
        start = end - each.size_bytes
        for at in (start, end - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            (problem,) = m.folder_problems(tmp_path, manifest)
            assert problem.startswith(f"{path}, {each.key}: expected sha256 "), (at, problem)
        end = start
    for content, words in (
        (whole.replace(b'"bias"', b'"biaz"'), "expected the header of the tensors"),
        (whole[:-1], f"expected {len(whole)} bytes .*, found {len(whole) - 1} bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{path}: {words}") as caught:
            m.require_file(tmp_path, manifest.files[1])
        assert m.folder_problems(tmp_path, manifest) == [str(caught.value)]
    path.unlink()
    (tmp_path / "extra.safetensors").touch()
    (tmp_path / "notes.txt").write_bytes(b"Some text")
    missing, edited, unknown = m.folder_problems(tmp_path, manifest)
    assert "b.safetensors: expected" in missing and "found no file" in missing
    assert "notes.txt: expected sha256" in edited and "extra.safetensors: not listed" in unknown


EDITS = {"facts": lambda found: found["facts"].update(step=4), "no digest": lambda found: found.pop("digest")}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_manifest_covers_itself(tmp_path, edit):
    write_checkpoint(tmp_path)
    path = tmp_path / m.MANIFEST
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found, sort_keys=True))  # control: the same content in another order
    m.read_manifest(tmp_path)
    edit(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=f"{m.MANIFEST}: expected digest"):
        m.read_manifest(tmp_path)


def test_what_is_no_manifest_of_this_version_is_refused(tmp_path):
    folder = tmp_path / "global_step_4"
    folder.mkdir()
    with pytest.raises(ConfigError, match="global_step_4: .*manifest.json, found none"):
        m.read_manifest(folder)
    write_checkpoint(folder)
    text = (folder / m.MANIFEST).read_text()
    for damaged in (text.replace('"version": 3', '"version": 1'), text[: len(text) // 2]):
        (folder / m.MANIFEST).write_text(damaged)
        with pytest.raises(ConfigError, match=m.MANIFEST):
            m.read_manifest(folder)


def test_a_writer_refuses_too_many_and_too_few_bytes(tmp_path):
    tensors = [entry(BIAS, "bias")]
    for size in (16, 21):
        with pytest.raises(RecipeError, match=f"x: bias: expected 20 bytes, found {size}"):
            writer.write_tensors(tmp_path, "x", tensors, lambda entry, size=size: [bytes(size)])
    odd = [entry(torch.ones(3).bfloat16(), "odd"), *tensors]
    assert m.in_data_order(odd) == odd[::-1]
    with writer.NewFile(tmp_path / "x"), pytest.raises(RecipeError, match="another process writes this file"):
        writer.NewFile(tmp_path / "x").__enter__()
    assert not list(tmp_path.glob("x*"))


def test_files_are_durable_before_they_have_their_names(tmp_path, monkeypatch):
    calls = []

    def record_calls(name, describe):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given: calls.append((name, describe(given))) or function(*given))

    record_calls("fsync", lambda given: os.path.basename(os.readlink(f"/proc/self/fd/{given[0]}")))
    record_calls("replace", lambda given: os.path.basename(given[1]))
    name = "a.safetensors"
    write(tmp_path, name)
    assert calls == [("fsync", f"{name}.partial"), ("replace", name), ("replace", f"{name}.json")]
    write(tmp_path, "b.safetensors"), write(tmp_path, "notes.txt")
    calls.clear()
    writer.complete_folder(tmp_path, MANIFEST)
    (first, temporary, named, last), folder = calls, ("fsync", tmp_path.name)
    assert first == last == folder and named == ("replace", m.MANIFEST) and temporary[1].startswith(m.MANIFEST)


def test_a_full_disk_is_named_and_leaves_no_file(tmp_path):
    with pytest.raises(RecipeError, match="notes.txt could not be written: .*finished files are kept"):
        with writer.NewFile(tmp_path / "notes.txt") as file:
            full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            file._file = mock.Mock(wraps=file._file, write=full)
            file.write(b"text")
    assert not list(tmp_path.glob("notes.txt*"))
