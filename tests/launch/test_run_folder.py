"""The folder of a run: what a start goes on with, what it moves out of its way, and what it refuses untouched."""

import errno
import json
import shutil
from contextlib import ExitStack, nullcontext

import pytest
from omegaconf import OmegaConf

from tests.launch.drivers import composed
from tests.weights.cases import make_checkpoint
from verl_patches.errors import ConfigError
from verl_patches.launch.run_folder import id_without_launcher, open_run_folder, require_start
from verl_patches.shared_files import LOCK, lock_file
from verl_patches.trainer.record import RUN, new_run_id, run_id

OTHER = "fedcba9876543210"


@pytest.fixture
def configured(tmp_path):
    """configured(**trainer): the configuration of run t; checkpoints are in its folder."""

    def make(**trainer):
        config = composed().copy()
        config.recipe.update({"output_root": str(tmp_path), "run": "t"})
        settings = {"default_local_dir": str(tmp_path / "t/checkpoints"), "save_freq": 2, "total_training_steps": 20}
        config.trainer.update({**settings, **trainer})
        return config

    return make


@pytest.fixture
def earlier(tmp_path, configured):
    """(folder, id) of a run that ended: its outputs, and checkpoints of steps 2 and 8."""
    with open_run_folder(configured()) as here:
        (here.path / "summary.json").write_text('{"of": "the run before"}')
    for step in (2, 8):
        make_checkpoint(here.path / "checkpoints", step, here.id)
    return here.path, here.id


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


def resume_path(path):
    return {"resume_mode": "resume_path", "resume_from_path": str(path)}


def test_a_fresh_start_moves_the_run_before_with_its_checkpoints_and_has_a_new_id(configured, earlier):
    folder, before = earlier
    (folder / "notes.txt").write_text("by the user")
    inode = (folder / "checkpoints/global_step_8").stat().st_ino
    with open_run_folder(configured()) as here:
        assert here.id != before and here.id == run_id(folder) and here.start.step is None
        aside = folder / "earlier/1"
        moved, back = here.said
        assert moved.startswith("| ") and f"{aside / 'checkpoints'}" in moved and "MB" in moved
        assert f"trainer.resume_from_path={aside / 'checkpoints/global_step_8'}" in back
    assert {path.name for path in aside.iterdir()} == {"summary.json", RUN, "checkpoints"} and run_id(aside) == before
    assert (aside / "checkpoints/global_step_8").stat().st_ino == inode  # a rename
    assert not list((folder / "checkpoints").glob("global_step_*")) and (folder / "notes.txt").exists()
    with open_run_folder(configured()) as again:  # a run that saved nothing
        assert again.id != here.id and again.said == ()
    assert sorted(path.name for path in (folder / "earlier").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_run_that_goes_on_keeps_its_id_and_its_checkpoints(configured, earlier, mode):
    folder, before = earlier
    given = {"resume_mode": mode, "resume_from_path": str(folder / "checkpoints/global_step_2")}
    with open_run_folder(configured(**given)) as here:
        assert (here.id, here.start.step, here.said) == (before, {"auto": 8, "resume_path": 2}[mode], ())
    assert run_id(folder) == before
    assert [path.name for path in (folder / "earlier/1").iterdir()] == ["summary.json"]
    assert len(list((folder / "checkpoints").glob("global_step_*"))) == 2


@pytest.mark.parametrize("run", [None, OTHER])
def test_auto_takes_only_checkpoints_of_its_own_run(configured, tmp_path, run):
    """Also not those of before there were ids."""
    saved = tmp_path / "t/checkpoints"
    make_checkpoint(saved, 8, run)
    with open_run_folder(configured(resume_mode="auto")) as here:
        assert here.start.step is None and here.id != run and len(here.said) == 2
    assert (tmp_path / "t/earlier/1/checkpoints/global_step_8").is_dir() and not list(saved.glob("global_step_*"))


def test_a_checkpoint_of_another_run_starts_a_new_one(configured, earlier, tmp_path):
    folder, before = earlier
    other = make_checkpoint(tmp_path / "other", 5, OTHER)
    with open_run_folder(configured(**resume_path(other))) as here:
        assert here.id not in (before, OTHER) and here.start.step == 5
    assert (folder / "earlier/1/checkpoints/global_step_8").is_dir() and other.is_dir()
    again = folder / "earlier/1/checkpoints/global_step_2"
    with open_run_folder(configured(**resume_path(again))) as here:
        assert here.id != before and here.start.step == 2


@pytest.mark.parametrize(
    ("settings", "held", "key"),
    [
        ({}, "t", "--run NAME"),
        ({"save_freq": 1}, "saved", "default_local_dir"),
        ({"save_freq": -1, "resume_mode": "auto"}, "saved", "default_local_dir"),
        ({"save_freq": -1, "resume_mode": "disable"}, "saved", None),
    ],
)
def test_a_folder_that_another_run_holds_is_refused(configured, tmp_path, settings, held, key):
    config = configured(default_local_dir=str(tmp_path / "saved"), **settings)
    (tmp_path / held).mkdir()
    with lock_file(tmp_path / held / LOCK):
        with pytest.raises(ConfigError, match=key) if key else nullcontext(), open_run_folder(config):
            pass
    with open_run_folder(config):  # the control: the lock is free
        pass


def test_a_file_system_without_locks_is_named(configured, monkeypatch):
    def refuse(path):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("verl_patches.shared_files.lock_file", refuse)
    with pytest.raises(ConfigError, match="no file locks.*recipe.run"), open_run_folder(configured()):
        pass


def test_a_start_that_was_killed_between_its_moves_loses_no_step_of_the_record(configured, earlier):
    """The record is in earlier/1 already, and not yet in the folder of the run again."""
    folder, own = earlier
    (folder / "earlier/1").mkdir(parents=True)
    (folder / "summary.json").unlink()
    steps = [{"step": 1, "seconds": {"step": 1.0}, "reward": 0.0}]
    (folder / "earlier/1/summary.json").write_text(json.dumps({"id": own, "steps": steps, "exit": "ok"}))
    (folder / "earlier/1/metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "earlier/2").mkdir()
    (folder / "earlier/2/summary.json").write_text(json.dumps({"id": OTHER, "steps": [{"step": 7}], "exit": "ok"}))
    with open_run_folder(configured(resume_mode="auto")):
        assert json.loads((folder / "summary.json").read_text())["steps"] == steps
        assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_checkpoint_that_this_run_set_aside_is_named_as_its_own(configured, earlier):
    folder, own = earlier
    aside = make_checkpoint(folder / "checkpoints/earlier/1", 9, own)
    with pytest.raises(ConfigError, match="this run has set aside"):
        require_start(configured(**resume_path(aside)))


@pytest.mark.parametrize("run", [None, OTHER])
def test_a_checkpoint_that_the_start_would_move_is_refused(configured, tmp_path, run):
    path = make_checkpoint(tmp_path / "t/checkpoints", 8, run)
    before = tree(tmp_path)
    with (
        pytest.raises(ConfigError, match="would begin a new run and move it.*--run NAME"),
        open_run_folder(configured(**resume_path(path))),
    ):
        pass
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "trainer", [{"resume_mode": "disable"}, {"resume_mode": "auto"}, {"resume_mode": "auto", "save_freq": -1}]
)
@pytest.mark.parametrize("run", [None, OTHER])
def test_checkpoints_of_another_run_elsewhere_are_refused_and_nothing_moves(configured, tmp_path, run, trainer):
    elsewhere = tmp_path / "elsewhere"
    make_checkpoint(elsewhere, 8, run)
    id_of_t = new_run_id(tmp_path / "t", "t")
    (tmp_path / "t/summary.json").write_text("{}")
    config, before = configured(default_local_dir=str(elsewhere), **trainer), tree(tmp_path)
    for start in (lambda: require_start(config), open_run_folder(config).__enter__):
        with pytest.raises(ConfigError) as caught:
            start()
        text = str(caught.value)
        for words in (str(elsewhere), "global_step_8", run or "(no id)", id_of_t, "run t", "resume_from_path"):
            assert words in text
        assert tree(tmp_path) == before
    config.trainer.update({"resume_mode": "disable", "save_freq": -1})  # control: it touches no checkpoints
    with open_run_folder(config) as here:
        assert here.id != id_of_t


def test_a_folder_of_checkpoints_behind_a_link_is_elsewhere(configured, tmp_path):
    """Moving the link would leave the next run's on another disk."""
    make_checkpoint(tmp_path / "disk", 8, OTHER)
    (tmp_path / "t").mkdir()
    (tmp_path / "t/checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="holds global_step_8"):
        require_start(configured())
    shutil.rmtree(tmp_path / "disk/global_step_8")
    require_start(configured())


def test_own_checkpoints_elsewhere_are_gone_on_with(configured, tmp_path):
    elsewhere = {"default_local_dir": str(tmp_path / "elsewhere")}
    with open_run_folder(configured(**elsewhere)) as first:
        make_checkpoint(tmp_path / "elsewhere", 2, first.id)
    with open_run_folder(configured(resume_mode="auto", **elsewhere)) as here:
        assert (here.id, here.start.step) == (first.id, 2)
    with pytest.raises(ConfigError, match=f"global_step_2 of run {first.id}"):
        require_start(configured(**elsewhere))


@pytest.mark.parametrize(("trainer", "facts", "words"), [
    ({"total_training_steps": 8}, {}, r"step 8 is complete.*total of 8 \(trainer.total_training_steps\)"),
    ({"total_training_steps": 7}, {}, "trainer.total_training_steps"),
    ({"total_training_steps": 9}, {}, None),
    ({"total_epochs": 2}, {"steps_per_epoch": 4}, r"8 \(4 steps an epoch x .*trainer.total_training_steps"),
    ({"total_epochs": 3}, {"steps_per_epoch": 4}, None),
    ({"total_epochs": 2}, {"steps_per_epoch": 4, "settings": {"data.train_batch_size": 1}}, None),  # other steps
])  # fmt: skip
def test_a_run_that_has_reached_its_total_does_not_go_on(configured, tmp_path, trainer, facts, words):
    own = new_run_id(tmp_path / "t", "t")
    make_checkpoint(tmp_path / "t/checkpoints", 8, own, **facts)
    config, before = configured(resume_mode="auto", **{"total_training_steps": None, **trainer}), tree(tmp_path)
    if words is None:
        require_start(config)
    else:
        with pytest.raises(ConfigError, match=words):
            require_start(config)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("damage", ["manifest", "no manifest", "file"])
def test_a_damaged_newest_checkpoint_is_named_with_the_next_older_one(configured, earlier, damage):
    folder, before = earlier
    saved = folder / "checkpoints"
    make_checkpoint(saved, 5, before)
    for step, what in ((5, "file"), (8, damage)):  # 5 is no better
        folder_of_step = saved / f"global_step_{step}"
        bad = next(folder_of_step.glob("rank*")) if what == "file" else folder_of_step / "manifest.json"
        if what == "no manifest":
            bad.unlink()
        else:
            bad.write_bytes(bad.read_bytes()[:-2])
    older = saved / "global_step_2"
    auto = configured(resume_mode="auto")
    before_start = tree(folder)
    with pytest.raises(ConfigError) as caught:
        require_start(auto)
    words = f"trainer.resume_mode=resume_path trainer.resume_from_path={older}"
    assert bad.name in str(caught.value) and f"{bad.parent}" in str(caught.value) and words in str(caught.value)
    assert tree(folder) == before_start
    with open_run_folder(configured(**resume_path(older))) as here:
        assert (here.id, here.start.step) == (before, 2)
    shutil.rmtree(older)
    words = "no older one of this run is whole.*resume_mode=disable.*default_local_dir.*another one"
    with pytest.raises(ConfigError, match=words):
        require_start(auto)


def test_a_save_that_was_killed_after_its_last_file_is_the_newest_checkpoint(configured, earlier):
    folder, before = earlier
    path = make_checkpoint(folder / "checkpoints", 9, before)
    path.rename(path.with_name(f"global_step_9.writing-{before}-0123abcd"))
    with open_run_folder(configured(resume_mode="auto")) as here:
        assert here.start.step == 9 and path.is_dir()


@pytest.mark.parametrize("text", ["{", "[]", '{"id": 7}', '{"id": "../../etc/0123"}'])
def test_a_damaged_id_is_refused_by_the_name_of_its_file(configured, tmp_path, text):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / RUN).write_text(text)
    with pytest.raises(ConfigError, match=RUN):
        require_start(configured(resume_mode="auto"))


def test_verls_own_checkpoints_are_left_where_they_are(configured, tmp_path):
    config = configured(resume_mode="auto")
    config.recipe.patches = ["-checkpoint.*"]
    (tmp_path / "t/checkpoints/global_step_3/actor").mkdir(parents=True)
    with open_run_folder(config) as here:
        assert here.start.step is None
    assert (tmp_path / "t/checkpoints/global_step_3/actor").is_dir()


def test_without_a_launcher_the_folder_of_checkpoints_keeps_the_id(configured, tmp_path):
    saved = tmp_path / "plain"
    given = {"default_local_dir": str(saved), "resume_mode": "auto"}

    def start(**trainer):
        config = configured(**{**given, **trainer})
        with ExitStack() as held:
            found = id_without_launcher(OmegaConf.merge(config, {"recipe": {"run": "elsewhere"}}), held)
            if config.trainer.save_freq > 0:
                with pytest.raises(ConfigError, match="being written by another run"), ExitStack() as other:
                    id_without_launcher(config, other)
        return found

    first = start()
    assert json.loads((saved / RUN).read_text())["id"] == first != start()  # nothing was saved
    own = run_id(saved)
    make_checkpoint(saved, 2, own)
    assert start() == own == start(resume_mode="resume_path", resume_from_path=str(saved / "global_step_2"))
    with pytest.raises(ConfigError, match=f"global_step_2 of run {own}"):
        start(resume_mode="disable")
    assert start(resume_mode="disable", save_freq=-1) != own and run_id(saved) == own
    (saved / RUN).unlink()
    with pytest.raises(ConfigError, match="no id"):
        start()
