"""Test files that several processes use: replaced whole or not at all, one holder of a folder, complete appends."""

import pytest

from verl_patches.shared_files import LOCK, GrowingFile, file_fault, is_locked, locked_folder, replacing, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_has_the_old_content_or_the_new_one(tmp_path, durable):
    path = tmp_path / "a.json"
    write_whole(path, "old", durable)
    with pytest.raises(KeyError), replacing(path, durable) as new:
        new.write_text("ne")
        raise KeyError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replacing(path, durable) as new:
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_folder_has_one_holder_and_who_waits_may_try_again(tmp_path):
    folder, attempts = tmp_path / "made", []

    def hold_folder(busy):
        return locked_folder(folder, busy, lambda error: ValueError(error.strerror))

    def busy():
        attempts.append(1)
        return KeyError() if len(attempts) == 3 else None

    with hold_folder(lambda: None):
        assert is_locked(folder / LOCK)
        with pytest.raises(KeyError), hold_folder(busy):
            pass
    assert len(attempts) == 3 and is_locked(folder / LOCK) is False
    with hold_folder(KeyError):
        pass
    (tmp_path / "file").write_text("of a user")
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(tmp_path / "file")
    for place in (folder, tmp_path / "file"):  # a lock that is a link is not followed
        with pytest.raises(ValueError), locked_folder(place, KeyError, lambda error: ValueError(error.strerror)):
            pass
    assert (tmp_path / "file").read_text() == "of a user"


def test_what_was_appended_is_read_once(tmp_path):
    file = GrowingFile(tmp_path / "log", skip=1)
    assert list(file.blocks()) == []  # not there yet
    for text, found in (("abcd", [b"bc", b"d"]), ("", []), ("e", [b"e"])):
        with file.path.open("a") as log:
            log.write(text)
        assert list(file.blocks(2)) == found


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345678\n"
FAULTY_FILES = {  # content, or None for a link to nothing -> words of the fault
    "pointer.json": (LFS_POINTER, "Git LFS pointer"), "model.safetensors": (LFS_POINTER, "Git LFS pointer"),
    "page.parquet": (b"\n<!DOCTYPE html>\n<html></html>", "web page"),
    "error.jsonl": (b"<?xml version='1.0'?><Error/>", "web page"), "empty.parquet": (b"", "empty"),
    "blank.jsonl": (b"\xef\xbb\xbf \n", "empty"), "cut.json": (b'[{"a": 1},', "cut off"),
    "cut.parquet": (b"PAR1\x15\x04", "cut off"), "gone.json": (None, "link to ../../blobs/0123"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY_FILES)
def test_a_file_that_a_download_did_not_bring_is_named(tmp_path, name):
    content, words = FAULTY_FILES[name]
    path = tmp_path / name
    if content is None:
        path.symlink_to("../../blobs/0123")
    else:
        path.write_bytes(content)
    assert words in file_fault(path)


def test_whole_files_have_no_fault(tmp_path):
    wholes = {"a.json": b'\xef\xbb\xbf{"a": "<html>"}\n', "a.parquet": b"PAR1...PAR1", "a.jsonl": b'{"a": 1}\n{"a"'}
    for name, content in {**wholes, "a.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}.items():
        (tmp_path / name).write_bytes(content)
        assert file_fault(tmp_path / name) == ""
    (tmp_path / "link.json").symlink_to("a.json")
    assert file_fault(tmp_path / "link.json") == file_fault(tmp_path / "absent.json") == file_fault(tmp_path) == ""
