"""Test folders of a run: how starts are numbered, chained and found, and which checkpoints a chain has and removes.

tests/run/test_run_folder.py tests checkpoints elsewhere and totals.
"""

import json
import multiprocessing
import os
import shutil

import pytest

from tests.weights.cases import make_checkpoint, make_start
from verl_patches.errors import ConfigError
from verl_patches.weights.run_folders import (
    START_FILE,
    CheckpointChain,
    Link,
    chain_steps,
    checkpoint_chain,
    data_facts,
    find_start,
    list_starts,
    path_to_resume,
    read_start,
    remove_checkpoint,
    require_same_data,
    require_start,
    start_chain,
    take_start,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def chain_checkpoints(start):
    """Return {step: start} of the checkpoints of a start's chain."""
    return {step: path.parents[1].name for step, path in checkpoint_chain(read_start(start)).checkpoints().items()}


# ---- starts


def test_starts_are_numbered_over_both_roots_and_latest_is_the_newest(tmp_path):
    home, other = tmp_path / "out/r", tmp_path / "disk/r"
    (other / "0004").mkdir(parents=True)  # a launcher was killed before it wrote the record
    assert [take_start([home, other], None, None) for _ in range(2)] == ["0005", "0006"]
    assert take_start([home], ("0006", 3), None) == "0007"
    assert [os.readlink(place / "latest") for place in (home, other)] == ["0007", "0006"]
    assert [start.name for start in list_starts(other)] == ["0005", "0006"]
    assert read_start(home / "0007").parent == ("0006", 3) and read_start(home / "0006").saves_in == other / "0006"
    assert read_start(other / "0004") is None and read_start(tmp_path / "absent") is None
    assert require_start(home / "0007").parent == ("0006", 3)
    with pytest.raises(ConfigError, match="absent: expected the folder of a start, with start.json, found none"):
        require_start(tmp_path / "absent")


def _take_starts(home, count):
    for _ in range(count):
        take_start([home], None, None)


def test_two_processes_never_take_the_same_folder(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_take_starts, [(tmp_path, 10)] * 4)
    assert [start.name for start in list_starts(tmp_path)] == [f"{number:04d}" for number in range(1, 41)]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"start": "0002", "from": {"start": "0002", "step": 1}}'])
def test_a_damaged_record_is_named(tmp_path, text):
    start = make_start(tmp_path)
    (start / START_FILE).write_text(text)
    with pytest.raises(ConfigError, match=f"{start / START_FILE}: expected the record of a start"):
        list_starts(tmp_path)


def test_a_chain_has_of_each_ancestor_the_steps_up_to_the_one_gone_on_after(tmp_path):
    """Check a fork: start 3 goes on from step 4 of start 2, and start 4 from step 2 of start 1."""
    home = tmp_path / "r"
    first = make_start(home, (1, 2, 3))
    second = make_start(home, (4, 5), ("0001", 3))
    third = make_start(home, (5, 6), ("0002", 4))
    fourth = make_start(home, (3,), ("0001", 2))
    assert [(link.folder.name, link.last_step) for link in start_chain(read_start(third))] == [
        ("0001", 3),
        ("0002", 4),
        ("0003", None),
    ]
    assert chain_checkpoints(third) == {1: "0001", 2: "0001", 3: "0001", 4: "0002", 5: "0003", 6: "0003"}
    assert chain_checkpoints(second)[5] == "0002" and chain_checkpoints(fourth) == {1: "0001", 2: "0001", 3: "0004"}
    for start, begun in ((first, 1), (second, 4), (third, 5), (fourth, 3)):
        for step in range(begun, 8):
            (start / f"of_{step}").touch()

    def list_files(folder):
        return [(int(path.name[3:]), folder.name) for path in folder.glob("of_*")]

    joined = chain_steps(read_start(third), list_files)
    assert [*joined.values()] == ["0001"] * 3 + ["0002"] + ["0003"] * 3 and [*joined] == list(range(1, 8))
    shutil.rmtree(second)
    assert chain_checkpoints(third) == {5: "0003", 6: "0003"}  # the chain begins after the start whose folder is gone


def test_a_start_that_went_on_from_a_start_which_saved_nothing_has_the_same_ancestor(tmp_path):
    make_start(tmp_path / "r", (1, 2))
    make_start(tmp_path / "r", (), ("0001", 2))
    assert chain_checkpoints(make_start(tmp_path / "r", (3,), ("0002", 2))) == {1: "0001", 2: "0001", 3: "0003"}


def test_a_folder_that_was_copied_has_its_own_chain_and_checkpoints(tmp_path):
    make_start(tmp_path / "r", (1, 2))
    make_start(tmp_path / "r", (3,), ("0001", 2))
    copied = shutil.copytree(tmp_path / "r", tmp_path / "elsewhere/other", symlinks=True)
    chain = checkpoint_chain(read_start(find_start(copied, tmp_path)))
    assert all(path.is_relative_to(copied) for path in chain.checkpoints().values()) and len(chain.checkpoints()) == 3
    assert chain.newest() == copied / "0002/checkpoints/global_step_3"


def test_a_run_a_start_and_a_path_are_found(tmp_path):
    root, home = tmp_path / "outputs", tmp_path / "outputs/r"
    first, second = make_start(home), make_start(home)
    for given in ("r", home, home / "latest", "r/latest", "r/0002", second):
        assert find_start(type(home)(given), root).resolve() == second.resolve(), given
    assert find_start(type(home)("r/0001"), root) == first
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="or a log, found a folder without them; .* in .*outputs: r"):
        find_start(tmp_path / "empty", root, ", or a log")
    with pytest.raises(ConfigError, match="no such folder"):
        find_start(tmp_path / "absent", root)


# ---- checkpoints


@pytest.mark.parametrize(("keep", "kept"), [(None, [1, 2, 3, 4, 5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_retention_counts_the_chain_and_removes_what_killed_saves_left(tmp_path, keep, kept):
    home = tmp_path / "r"
    first = make_start(home, (1, 2, 3))
    second = make_start(home, (4, 5), ("0001", 3))
    make_checkpoint(
        first / "checkpoints", 8
    )  # a later step than the one that `second` continues: it belongs to `first` alone
    for start in (first, second):
        (start / "checkpoints/global_step_7").mkdir()
    checkpoint_chain(read_start(second)).remove_oldest(keep, second / "checkpoints/global_step_5")
    assert [*chain_checkpoints(second)] == kept and [*chain_checkpoints(first)][-1] == 8
    assert not list(home.glob("*/checkpoints/global_step_7"))


def test_retention_removes_nothing_of_another_chain_nor_what_it_began_from(tmp_path):
    home = tmp_path / "r"
    first = make_start(home, (1, 2, 3, 4))
    fork = make_start(home, (3, 4), ("0001", 2))
    fresh = make_start(home, (1, 2))
    last = make_start(home, (5, 6), ("0001", 4))
    chain = checkpoint_chain(read_start(last))
    chain.remove_oldest(1, last / "checkpoints/global_step_6")
    assert names(first / "checkpoints") == ["global_step_2"] and chain_checkpoints(last) == {2: "0001", 6: "0004"}
    assert chain_checkpoints(fork) == {2: "0001", 3: "0002", 4: "0002"} and chain_checkpoints(fresh) == {
        1: "0003",
        2: "0003",
    }


def test_the_one_just_written_stays_where_older_runs_have_later_steps(tmp_path):
    path = make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 5)
    CheckpointChain((Link(tmp_path),)).remove_oldest(1, path)
    assert names(tmp_path) == ["global_step_2", "global_step_5"]


def test_a_removal_that_is_killed_leaves_no_checkpoint(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, 2)

    def killed(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(OSError):
        remove_checkpoint(path)
    assert path.is_dir() and CheckpointChain((Link(tmp_path),)).checkpoints() == {}


@pytest.mark.parametrize("damage", ["manifest", "file"])
def test_a_damaged_newest_checkpoint_is_named_with_the_next_older_whole_one(tmp_path, damage):
    make_start(tmp_path / "r", (1, 2))
    start = make_start(tmp_path / "r", (3, 4), ("0001", 2))
    for step, what in ((3, "file"), (4, damage)):  # both checkpoints of this start are damaged
        folder = start / f"checkpoints/global_step_{step}"
        bad = next(folder.glob("rank*")) if what == "file" else folder / "manifest.json"
        bad.write_bytes(bad.read_bytes()[:-2])
    with pytest.raises(ConfigError) as caught:
        checkpoint_chain(read_start(start)).newest()
    older = tmp_path / "r/0001/checkpoints/global_step_2"
    assert str(bad) in str(caught.value) and f"resume_from_path={older}" in str(caught.value)
    shutil.rmtree(tmp_path / "r/0001")
    with pytest.raises(ConfigError, match="no undamaged older checkpoint"):
        checkpoint_chain(read_start(start)).newest()


# ---- what can be resumed from


def test_a_path_is_needed_to_resume_from_one(tmp_path):
    assert path_to_resume("auto", None) is path_to_resume("disable", str(tmp_path)) is None
    assert path_to_resume("resume_path", str(tmp_path)) == tmp_path
    make_start(tmp_path / "r", (3,))
    given = path_to_resume("resume_path", str(tmp_path / "r/latest/checkpoints/global_step_3"))
    assert given == tmp_path / "r/0001/checkpoints/global_step_3"
    for given in (None, "", False):
        with pytest.raises(ConfigError, match="needs trainer.resume_from_path"):
            path_to_resume("resume_path", given)


def test_other_data_are_refused_by_rows_and_digest_and_not_by_their_path(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    files = {name: str(tmp_path / f"{name}.parquet") for name in ("a", "same", "longer", "other")}
    for name, rows in (("a", [1, 2]), ("same", [1, 2]), ("longer", [1, 2, 3]), ("other", [1, 3])):
        parquet.write_table(pa.table({"x": rows}), files[name])
    before = data_facts(files["a"])
    assert before["rows"] == 2 and data_facts([files["a"], files["longer"]])["rows"] == 5
    manifest = type("Read", (), {"facts": {"data": json.loads(json.dumps(before))}})
    require_same_data(tmp_path, manifest, data_facts([files["same"]]), False)
    for name, words in (("longer", "2 rows in .* this run has 3 rows"), ("other", "this run has 2 rows in")):
        now = data_facts(files[name])
        with pytest.raises(ConfigError, match=f"{words}.*{name}.parquet.*recipe.resume_other_data=true"):
            require_same_data(tmp_path, manifest, now, False)
        require_same_data(tmp_path, manifest, now, True)
    require_same_data(
        tmp_path, manifest, data_facts([str(tmp_path / "absent")]), False
    )  # these files are not on this machine
