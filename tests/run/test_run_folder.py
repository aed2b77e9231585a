"""Test where a start of a run goes on, its refusals, which change nothing, and that a name has one live start.

tests/weights/test_run_folders.py has folders that were copied and damaged checkpoints.
"""

import errno
import json
import os
import shutil
import socket
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.launch.drivers import run_named_t
from tests.weights.cases import make_checkpoint, make_start
from verl_patches.errors import ConfigError
from verl_patches.run.run_folder import begin_without_launcher, lock_run, make_start_folder, require_start
from verl_patches.run.run_start import driver_run, next_start, with_start
from verl_patches.shared_files import LOCK, lock_file
from verl_patches.weights.run_folders import data_facts, read_start


@pytest.fixture
def make_run(tmp_path):
    """Return make_run(**trainer), which composes run t."""

    def make(recipe=(), **trainer):
        settings = {"default_local_dir": str(tmp_path / "t/checkpoints"), "save_freq": 2, "total_training_steps": 20}
        return run_named_t(tmp_path, recipe, {**settings, "resume_mode": "auto", **trainer})

    return make


def require_next_start(run):
    """Return where a start of the run goes on now."""
    return require_start(with_start(run))


def take_next_start(run):
    """Start the run; return where it goes on, and the record of the new start."""
    with lock_run(run):
        start = require_next_start(run)
        name = make_start_folder(run, start)
    return start, read_start(run.home / name)


def resume_settings(path):
    return {"resume_mode": "resume_path", "resume_from_path": str(path)}


def folder_contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*") if path.name != LOCK}


def test_auto_goes_on_from_the_newest_of_the_chain_and_records_it(make_run, tmp_path):
    first, record = take_next_start(make_run())
    assert (first.resumed, record.name, record.parent) == (None, "0001", None)
    make_checkpoint(tmp_path / "t/0001/checkpoints", 2)
    for name, parent in (("0002", ("0001", 2)), ("0003", ("0002", 2))):  # the second start saved nothing
        start, record = take_next_start(make_run())
        assert (record.name, record.parent, start.step, start.held) == (name, parent, 2, 1)
        assert start.resumed == tmp_path / "t/0001/checkpoints/global_step_2"
    make_checkpoint(tmp_path / "t/0003/checkpoints", 4)
    assert next_start(make_run()).step == 4 and (tmp_path / "t/latest").resolve() == tmp_path / "t/0003"


def test_a_driver_is_handed_its_folder_and_its_checkpoint_and_looks_for_none(make_run, tmp_path):
    run = make_run()
    fresh = driver_run(run, next_start(run), "0001")
    assert (fresh.folder, fresh.verl.trainer.resume_mode) == (tmp_path / "t/0001", "disable")
    path = make_start(tmp_path / "t", (2,)) / "checkpoints/global_step_2"
    again = driver_run(run, next_start(run), "0002").verl.trainer
    assert (again.resume_mode, again.resume_from_path) == ("resume_path", str(path))
    verls = without_our_checkpoints(run)
    assert driver_run(verls, next_start(verls), "0002").verl.trainer.resume_mode == "auto"


def without_our_checkpoints(run):
    return replace(run, rows=frozenset(row for row in run.rows if not row.startswith("checkpoint.")))


def test_a_new_run_of_that_name_leaves_all_as_it_is(make_run, tmp_path):
    make_start(tmp_path / "t", (2, 8))
    before = folder_contents(tmp_path / "t/0001")
    start, record = take_next_start(make_run(resume_mode="disable"))
    assert start.resumed is record.parent is None and folder_contents(tmp_path / "t/0001") == before
    with pytest.raises(ConfigError) as caught:  # the newest chain has no checkpoint
        require_next_start(make_run())
    newest = tmp_path / "t/0001/checkpoints/global_step_8"
    assert f"resume_from_path={newest}" in str(caught.value) and "nothing was started" in str(caught.value)
    start, record = take_next_start(make_run(**resume_settings(newest)))
    assert record.parent == ("0001", 8)


def test_a_start_from_an_older_step_leaves_the_later_ones_out_of_its_chain(make_run, tmp_path):
    folder = make_start(tmp_path / "t", (2, 4, 6)) / "checkpoints"
    start, record = take_next_start(make_run(**resume_settings(folder / "global_step_2")))
    assert (record.parent, start.held) == (("0001", 2), 1)
    make_checkpoint(tmp_path / "t/0002/checkpoints", 4)
    assert next_start(make_run()).resumed == tmp_path / "t/0002/checkpoints/global_step_4"


def test_a_checkpoint_of_another_run_begins_a_chain_that_auto_does_not_begin_anew(make_run, tmp_path):
    other = make_start(tmp_path / "other", (5,)) / "checkpoints/global_step_5"
    start, record = take_next_start(make_run(**resume_settings(other)))
    assert (start.step, record.parent, record.source) == (5, None, str(other))
    with pytest.raises(ConfigError, match=f"that start was resumed from {other}; nothing was started"):
        require_next_start(make_run())


def test_checkpoints_elsewhere_have_the_same_starts(make_run, tmp_path):
    """Resume from trainer.default_local_dir, also if the run's outputs are lost."""
    elsewhere = {"default_local_dir": str(tmp_path / "disk")}
    take_next_start(make_run(**elsewhere))
    make_checkpoint(tmp_path / "disk/t/0001/checkpoints", 2)
    start, record = take_next_start(make_run(**elsewhere))
    assert record.parent == ("0001", 2) == read_start(tmp_path / "disk/t/0002").parent
    assert record.saves_in == tmp_path / "disk/t/0002"
    shutil.rmtree(tmp_path / "t")
    start, record = take_next_start(make_run(**elsewhere))
    assert start.resumed == tmp_path / "disk/t/0001/checkpoints/global_step_2" and record.name == "0003"


def test_a_name_that_another_start_holds_is_refused(make_run, tmp_path):
    """Refuse it by its own folder, and by its checkpoints' folder if another output root has the same name."""
    run = make_run(default_local_dir=str(tmp_path / "saved"))
    for held, key in (("t", "--run NAME"), ("saved/t", "default_local_dir")):
        (tmp_path / held).mkdir(parents=True, exist_ok=True)
        with lock_file(tmp_path / held / LOCK), pytest.raises(ConfigError, match=key), lock_run(run):
            pass
    with lock_run(run):  # control: the locks are free
        here = rf"of pid {os.getpid()} on {socket.gethostname()}; .*NFS.*trainer.resume_mode=resume_path"
        with pytest.raises(ConfigError, match=here), lock_run(run):
            pass


def test_a_file_system_without_locks_is_named(make_run, monkeypatch):
    def refuse(path):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("verl_patches.shared_files.lock_file", refuse)
    with pytest.raises(ConfigError, match="no file locks.*recipe.run"), lock_run(make_run()):
        pass


@pytest.mark.parametrize(("trainer", "facts", "words"), [
    ({"total_training_steps": 8}, {}, r"step 8 is complete.*total of 8 \(trainer.total_training_steps\)"),
    ({"total_epochs": 2}, {"steps_per_epoch": 4}, r"8 \(4 steps an epoch x .*trainer.total_training_steps"),
    ({"total_epochs": 2}, {"steps_per_epoch": 4, "settings": {"data.train_batch_size": 1}}, None),  # another batch size
])  # fmt: skip
def test_a_run_that_has_reached_its_total_does_not_go_on(make_run, tmp_path, trainer, facts, words):
    make_checkpoint(make_start(tmp_path / "t") / "checkpoints", 8, **facts)
    run = make_run(**{"total_training_steps": None, **trainer})
    if words is None:
        require_next_start(run)
    else:
        before = folder_contents(tmp_path)
        with pytest.raises(ConfigError, match=words):
            require_next_start(run)
        assert folder_contents(tmp_path) == before


def test_other_data_than_the_checkpoints_are_named_and_stop_the_start(make_run, tmp_path):
    files = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    for file, rows in zip(files, ([1, 2], [1, 3]), strict=True):
        parquet.write_table(pa.table({"x": rows}), file)
    make_checkpoint(make_start(tmp_path / "t") / "checkpoints", 2, data=data_facts(files[0]))
    run = make_run()
    other = run.with_verl({"data.train_files": [files[1]]})
    with pytest.raises(ConfigError, match="a.parquet; this run has .*b.parquet.*recipe.resume_other_data=true"):
        require_next_start(other)
    assert require_next_start(replace(other, recipe=replace(run.recipe, resume_other_data=True))).step == 2


def test_verls_own_checkpoints_are_left_where_they_are(make_run, tmp_path):
    (tmp_path / "t/checkpoints/global_step_3/actor").mkdir(parents=True)
    start, record = take_next_start(without_our_checkpoints(make_run()))
    assert start.resumed is None and record.name == "0001"
    assert (tmp_path / "t/checkpoints/global_step_3/actor").is_dir()


def test_without_a_launcher_a_record_has_a_start_and_checkpoints_their_place(make_run, tmp_path):
    run = make_run(default_local_dir=str(tmp_path / "plain"))
    with ExitStack() as held:
        assert begin_without_launcher(run, held).folder == tmp_path / "t/0001"
        with pytest.raises(ConfigError, match="being written by another run"), ExitStack() as other:
            begin_without_launcher(run, other)
    with ExitStack() as held:
        unnamed = begin_without_launcher(replace(run, recipe=replace(run.recipe, run=None)), held)
    assert unnamed.start.name is None
    assert json.loads((tmp_path / "t/0001/start.json").read_text())["from"] is None
    assert [path.name for path in (tmp_path / "plain").iterdir()] == [LOCK]


def test_a_run_of_an_earlier_version_is_refused_in_one_sentence(make_run, tmp_path):
    assert next_start(make_run()).resumed is None
    (tmp_path / "t").mkdir()
    (tmp_path / "t/summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="t: expected folders 0001, .*found summary.json"):
        next_start(make_run())
