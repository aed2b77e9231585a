"""The one line that goes into upstream's Megatron worker module: put in, left alone, refused, taken out."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_patches.errors import ConfigError
from verl_patches.patching import install_prelude
from verl_patches.patching.install_prelude import INSIDE, LINE, insert_line, remove_line

# the shape of upstream's file, none of its text
WORKER = '''# Copyright
"""
A docstring; import nothing_here
"""

import logging
import os

import torch
import torch.distributed

logger = logging.getLogger(__file__)


def seed(n):
    import random


class ActorRolloutRefWorker:
    pass
'''


def make_tree(root: Path, text: str | bytes = WORKER) -> Path:
    """A checkout with a verl package in it; returns its worker file."""
    file = root / "verl" / INSIDE
    file.parent.mkdir(parents=True)
    (root / "verl" / "__init__.py").write_text("raise RuntimeError('install-prelude must not import verl')\n")
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("inner", ["", "verl"])
def test_goes_before_the_first_import_once_and_comes_out_byte_for_byte(tmp_path, inner):
    file = make_tree(tmp_path)
    result = insert_line(tmp_path / inner)
    assert (result.file, result.line, result.state) == (file, 6, "installed")
    assert file.read_text() == WORKER.replace("import logging\n", f"{LINE}\nimport logging\n", 1)
    again = insert_line(tmp_path / inner)
    assert (again.line, again.state) == (6, "already installed")
    assert file.read_text().count(LINE) == 1
    assert remove_line(tmp_path / inner).state == "removed"
    assert file.read_text() == WORKER
    assert remove_line(tmp_path / inner).state == "not installed"
    assert names(file.parent) == [file.name]  # no temporary file is left


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    head=st.sampled_from(
        ["", "#!/usr/bin/python\n", "# -*- coding: utf-8 -*-\n", '"""Doc."""\n', "\n\n", "'''d\n'''\n"]
    ),
    future=st.sampled_from(["", "from __future__ import division\n", "from __future__ import (\n annotations,\n)\n"]),
    body=st.sampled_from(
        ["import torch\n", "from os import (\n path,\n)\nimport torch\n", "X = 1\nimport torch, os\n"]
    ),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    bom=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    tail=st.sampled_from(["", "\n", "# é\n"]),
)
def test_any_recognised_file_survives_there_and_back(tmp_path_factory, head, future, body, newline, bom, tail):
    text = head + future + body + "class ActorRolloutRefWorker: pass" + tail
    data = bom + text.replace("\n", newline).encode()
    root = tmp_path_factory.mktemp("tree")
    file = make_tree(root, data)
    line = insert_line(root).line
    new = file.read_bytes()
    assert new.count(LINE.encode() + newline.encode()) == 1
    assert new.startswith(bom) and not new.removeprefix(bom).startswith(b"\xef\xbb\xbf")
    assert new.removeprefix(bom).decode().splitlines()[line - 1] == LINE
    compile(new, "worker", "exec")  # __future__ imports are still first
    assert remove_line(root).state == "removed"
    assert file.read_bytes() == data


def test_finds_the_installed_verl_without_importing_it(tmp_path, monkeypatch):
    file = make_tree(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    assert insert_line().file == file
    assert "verl" not in sys.modules
    assert remove_line().state == "removed"


def test_the_pinned_verl_package_is_recognised(tmp_path):
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed")
    text = (Path(spec.origin).parent / INSIDE).read_bytes()
    text = text.replace(LINE.encode() + b"\n", b"")  # a user may have installed the prelude there
    file = make_tree(tmp_path, text)
    insert_line(tmp_path)
    lines = file.read_text().splitlines()
    assert lines.index(LINE) < lines.index("import torch")
    remove_line(tmp_path)
    assert file.read_bytes() == text


@pytest.mark.upstream
def test_the_pinned_verl_commit_is_recognised(tmp_path, upstream_text):
    commit = "54c9b7364c2d188b2ba4107404cfa3c2b446df19"
    text = upstream_text("volcengine/verl", commit, "verl/workers/megatron_workers.py")
    file = make_tree(tmp_path, text)
    insert_line(tmp_path)
    lines = file.read_text().splitlines()
    assert lines.index(LINE) < lines.index("import torch")
    remove_line(tmp_path)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (WORKER.replace("class ActorRolloutRefWorker", "class Other"), "no class ActorRolloutRefWorker"),
        (WORKER.replace("import torch\n", ""), "no `import torch`"),
        (WORKER.replace("import logging", "try:\n    import x\nfinally: x = 1\nimport logging"), "begins a line"),
        (WORKER.replace("import logging", "X = 1; import logging"), "begins a line"),
        (WORKER + "def f(:\n", "invalid syntax"),
        (WORKER.replace("import logging", "from verl_patches import prelude_patch\n"), "expected no prelude"),
        (WORKER.replace("import logging", f"# {LINE}\nimport logging"), "expected no prelude"),
        (WORKER.replace("import logging", f"{LINE}  # mine\nimport logging"), "expected no prelude"),
        (WORKER.replace("import logging", f"{LINE}\n{LINE}\nimport logging"), "found 2"),
        (WORKER.replace("import torch\n", f"import torch\n{LINE}\n"), "before all other imports"),
        (WORKER.replace("import random", LINE), "before all other imports"),
        (WORKER.replace("import logging", "import verl_patches.other\nimport logging"), "expected no prelude"),
    ],
)
def test_refuses_what_it_does_not_recognise(tmp_path, text, words):
    file = make_tree(tmp_path, text)
    with pytest.raises(ConfigError, match="expected") as caught:
        insert_line(tmp_path)
    assert words in str(caught.value) and str(file) in str(caught.value)
    assert file.read_text() == text
    assert names(file.parent) == [file.name]


def test_undo_refuses_an_edited_prelude(tmp_path):
    text = WORKER.replace("import logging", f"{LINE}  # mine\nimport logging")
    file = make_tree(tmp_path, text)
    with pytest.raises(ConfigError, match="by hand"):
        remove_line(tmp_path)
    assert file.read_text() == text


def test_refuses_a_read_only_file(tmp_path):
    file = make_tree(tmp_path)
    file.chmod(0o444)
    with pytest.raises(ConfigError, match="read-only"):
        insert_line(tmp_path)
    assert file.read_text() == WORKER


def test_refuses_a_link_out_of_the_tree(tmp_path):
    inside, outside = make_tree(tmp_path / "checkout"), tmp_path / "cache.py"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(ConfigError, match="found a link"):
        insert_line(tmp_path / "checkout")
    assert outside.read_text() == WORKER


def test_keeps_the_mode_and_leaves_other_hard_links_alone(tmp_path):
    file, cache = make_tree(tmp_path / "checkout"), tmp_path / "cache.py"
    file.chmod(0o640)
    os.link(file, cache)
    insert_line(tmp_path / "checkout")
    assert LINE in file.read_text()
    assert cache.read_text() == WORKER
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_failed_write_leaves_the_file_whole(tmp_path, monkeypatch):
    file = make_tree(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(install_prelude.os, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        insert_line(tmp_path)
    assert file.read_text() == WORKER
    assert names(file.parent) == [file.name]


def test_says_what_to_do_where_there_is_no_verl(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--verl-path DIR"):
        insert_line(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="found none in this Python"):
        insert_line()
