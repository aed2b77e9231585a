"""Checkpoints in the trainer's process: what is complete, what is kept, what a killed save leaves; no workers."""

import multiprocessing
import os
import random
import signal
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from tests.reshard.cases import TINY
from verl_patches.errors import ConfigError
from verl_patches.trainer import checkpoint
from verl_patches.trainer.checkpoint import Checkpoints, changes
from verl_patches.weights import writer
from verl_patches.weights.checkpoint import CheckpointError, CheckpointReader, rank_files, write_rank
from verl_patches.weights.checkpoint_folders import newest, recover, remove_oldest, require_whole
from verl_patches.weights.manifest import Manifest, folder_problems, read_manifest, whole_tensor
from verl_patches.weights.train_state import Piece, Place

KILLS = 10


class Workers:
    """Two ranks that write one tensor each, of the step's value, before save_checkpoint returns."""

    def __init__(self):
        self.failing, self.loaded = False, None

    def save_checkpoint(self, folder, remote, step):
        for rank in range(2):
            tensor = torch.full((64,), float(step))
            entry = whole_tensor(f"weight/{rank}", "F32", (64,), name=f"t{rank}")
            piece = Piece(entry, tensor, (Place((64,), (1,), 0),))
            if not self.failing:
                write_rank(folder, rank, [piece], lambda piece: [piece.base], {})
        return [{"copied_bytes": 256, "seconds": 0.0}] * 2

    def finish_checkpoint(self):
        if self.failing:
            raise CheckpointError("rank 1: disk full")

    def load_checkpoint(self, folder, remote, remove):
        with CheckpointReader(folder) as reader:
            self.loaded = [reader.read(f"t{rank}")[0].item() for rank in range(2)]


class Saves(Checkpoints):
    """Without a model's folder and without a configuration of verl."""

    model = TINY

    def _model(self):
        return self.model

    def _model_files(self):
        return {"config.json": b"{}"}

    def _manifest(self, step, files):
        facts = {"step": step, "line": "pypi", **SETTINGS}
        return Manifest("checkpoint", TINY, "@2", "fp32", str(step), tuple(files), facts=facts)


SETTINGS = {"digest": "d", "patches": "p", "settings": {"data.seed": 0}}


@pytest.fixture
def saves(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "world_size", lambda config: 2)
    monkeypatch.setattr(checkpoint, "settings_of", lambda config: SETTINGS)

    def make(folder=tmp_path, **trainer):
        settings = {"default_local_dir": str(folder), "resume_mode": "auto", **trainer}
        config = OmegaConf.create({"trainer": settings, "recipe": {"line": "pypi"}})
        data = SimpleNamespace(position=0)
        data.state_dict, data.load_state_dict = lambda: data.position, lambda state: setattr(data, "position", state)
        parts = {"config": config, "actor_rollout_wg": Workers(), "train_dataloader": data, "global_steps": 0}
        return Saves(SimpleNamespace(**parts))

    return make


def save(checkpoints, step):
    checkpoints.trainer.global_steps = checkpoints.trainer.train_dataloader.position = step
    checkpoints.save()
    checkpoints.finish()


def test_the_newest_complete_one_is_resumed_and_the_oldest_are_removed(saves, tmp_path):
    run = saves(max_actor_ckpt_to_keep=3)
    for step in (1, 2, 9, 10):
        save(run, step)
    left = [sorted(path.name for path in tmp_path.iterdir())]
    remove_oldest(tmp_path, 2)
    left.append(sorted(path.name for path in tmp_path.iterdir()))
    assert left == [["global_step_10", "global_step_2", "global_step_9"], ["global_step_10", "global_step_9"]]
    assert [record["step"] for record in run.records] == [1, 2, 9, 10]
    again = saves()
    again.load()
    trainer = again.trainer
    assert (trainer.global_steps, trainer.train_dataloader.position) == (10, 10)
    assert trainer.actor_rollout_wg.loaded == [10, 10]
    assert not folder_problems(tmp_path / "global_step_9", read_manifest(tmp_path / "global_step_9"))


def test_damaged_files_are_named_without_reading_their_tensors(saves, tmp_path):
    """As the launcher does before a resumed run starts anything."""
    save(saves(), 3)
    folder = tmp_path / "global_step_3"
    require_whole(folder)  # control
    path = folder / rank_files(2)[2]
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], rf"{path.name}: expected {len(whole)} bytes .manifest., found {len(whole) - 1} bytes"),
        (whole.replace(b'"weight/1"', b'"weight/7"'), f"{path.name}: weight/1: expected .* found no such tensor"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            require_whole(folder)
    path.unlink()
    with pytest.raises(ConfigError, match=f"{path.name}: expected .* found no file"):
        require_whole(folder)


def test_auto_starts_anew_without_a_complete_one(saves, tmp_path):
    run = saves(tmp_path / "none")
    run.load()
    assert run.trainer.global_steps == 0 and run.trainer.actor_rollout_wg.loaded is None


def test_other_models_and_folders_that_are_no_checkpoints_are_refused(saves, tmp_path):
    save(saves(), 3)
    path = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_3")}
    other = saves(**path)
    other.model = TINY.__class__(**{**vars(TINY), "n_routed_experts": 4})
    with pytest.raises(ConfigError, match=r"another model: n_routed_experts 8 \(expected 4\)"):
        other.load()
    assert other.trainer.actor_rollout_wg.loaded is None
    with pytest.raises(ConfigError, match="no manifest.json"):
        saves(**{**path, "resume_from_path": str(tmp_path)}).load()
    with pytest.raises(ConfigError, match="needs trainer.resume_from_path"):
        saves(resume_mode="resume_path", resume_from_path=None).load()


def test_a_critic_and_a_remote_folder_are_refused(saves):
    run = saves()
    run.trainer.use_critic = True
    with pytest.raises(ConfigError, match="a critic would not be saved"):
        run.save()
    with pytest.raises(ConfigError, match="default_hdfs_dir is set"):
        saves(default_hdfs_dir="hdfs://x").save()


def test_another_recipe_is_said(saves, monkeypatch, caplog):
    save(saves(), 3)
    monkeypatch.setattr(checkpoint, "settings_of", lambda config: {"digest": "e", "settings": {"data.seed": 1}})
    saves().load()
    assert "data.seed was 0, is 1" in caplog.text
    assert changes({"a": 1}, {"a": 1, "b": 2}) == ["b was None, is 2"]


def test_an_error_of_a_writing_worker_stops_the_run_and_leaves_nothing_complete(saves, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_GRACE_S", 0.1)
    run = saves()
    save(run, 1)
    run.trainer.global_steps, run.trainer.actor_rollout_wg.failing = 2, True
    run.save()
    with pytest.raises(CheckpointError, match="rank 1: disk full"):
        run.finish()
    run.give_up()
    assert newest(tmp_path) == tmp_path / "global_step_1"
    run.trainer.actor_rollout_wg.failing = False
    save(saves(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "global_step_2"]


def _killed_at(point, run, step):
    """In a process of its own: save, and SIGKILL before the call number `point` that changes the disk."""
    torch.set_num_threads(1)
    calls = []

    def before(call):
        def counted(*args, **kwargs):
            calls.append(None)
            if len(calls) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir"):
        setattr(os, name, before(getattr(os, name)))
    writer.FileWriter._put = before(writer.FileWriter._put)
    save(run, step)
    os._exit(min(len(calls), 255))


def killed_at(point, run, step):
    process = multiprocessing.get_context("fork").Process(target=_killed_at, args=(point, run, step))
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.slow
def test_a_save_that_is_killed_anywhere_leaves_a_complete_checkpoint(saves, tmp_path):
    """At random points, and at the last ones, which rename and remove; the next run saves the same step again."""
    run = saves(max_actor_ckpt_to_keep=1)
    save(run, 1)
    points = killed_at(0, run, 2)
    assert points > 30
    chosen = sorted({*random.Random(0).sample(range(1, points + 1), KILLS), *range(points - 6, points + 1)})
    seen = set()
    for number, point in enumerate(chosen):
        good, step = 2 + number, 3 + number
        assert killed_at(point, run, step) == -signal.SIGKILL
        again = saves(max_actor_ckpt_to_keep=1)
        again.load()
        found = again.trainer.global_steps
        assert found in (good, step) and again.trainer.actor_rollout_wg.loaded == [found] * 2, point
        seen.add(found - good)
        save(again, step)
        assert [path.name for path in tmp_path.iterdir()] == [f"global_step_{step}"], point
    assert seen == {0, 1}  # the last points are after the rename


def test_a_step_that_is_saved_again_replaces_the_folder_and_is_found_between_both_renames(saves, tmp_path):
    run = saves()
    save(run, 5)
    save(run, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_5"]
    os.rename(tmp_path / "global_step_5", tmp_path / "global_step_5.replaced-0123abcd")
    recover(tmp_path)
    assert newest(tmp_path) == tmp_path / "global_step_5"
    assert set(rank_files(2)) < {path.name for path in (tmp_path / "global_step_5").iterdir()}
