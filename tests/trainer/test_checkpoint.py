"""Test checkpoints in the trainer's process, without workers: completeness, retention, and saves that are killed."""

import copy
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.ranks import HANG_S
from tests.reshard.cases import TINY
from tests.runs import tiny, trainer_config
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.spec import NextStart
from verl_patches.trainer import checkpoint
from verl_patches.trainer.checkpoint import Checkpoints, loader_state
from verl_patches.weights import writer
from verl_patches.weights.checkpoint_files import CheckpointError, Place, StoredTensor, write_rank
from verl_patches.weights.manifest import (
    Manifest,
    content_digest,
    folder_problems,
    rank_file_names,
    rank_tensor_file,
    read_manifest,
    whole_entry,
)
from verl_patches.weights.run_folders import take_start

KILLS = 10


class Workers:
    """Stand in for two ranks that write one tensor each, of the step's value, before save_checkpoint returns."""

    def __init__(self):
        self.failing, self.loaded, self.fault, self.waits = False, None, None, 0

    def save_checkpoint(self, folder, remote, step):
        for rank in range(2):
            tensor = torch.full((64,), float(step))
            entry = whole_entry(f"weight/{rank}", "F32", (64,), name=f"t{rank}")
            piece = StoredTensor(entry, tensor, (Place((64,), (1,), 0),))
            if not self.failing:
                write_rank(folder, rank, [piece], lambda piece: [piece.base], {})
        return [{"copied_bytes": 256, "seconds": 0.0}] * 2

    def finish_checkpoint(self):
        self.waits += 1
        if self.failing:
            raise RecipeError("rank 1: disk full")

    def load_checkpoint(self, folder, remote, remove):
        if self.fault:
            raise CheckpointError(self.fault)
        files = [load_file(Path(folder) / rank_tensor_file(rank)) for rank in range(2)]
        self.loaded = [file[f"weight/{rank}"][0].item() for rank, file in enumerate(files)]


class Saves(Checkpoints):
    """Save without a model's folder and without a configuration of verl."""

    model = TINY

    def _model(self):
        return self.model

    def _model_files(self):
        return {"config.json": b"{}"}

    def _manifest(self, step, files, facts):
        facts = {**facts, "step": step, "line": "pypi", **SETTINGS}
        return Manifest(TINY, "@2", "fp32", str(step), tuple(files), facts=facts)


SETTINGS = {"patches": "p", "settings": {"data.seed": 0}}


@pytest.fixture
def saves(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "comparable_settings", lambda config: SETTINGS)

    def make(folder=tmp_path, start=None, **trainer):
        """Make the checkpoints in `folder`, or of this start of the run t."""
        recipe = replace(tiny().recipe, output_root=str(tmp_path), run="t")
        run = replace(tiny(), recipe=recipe, start=NextStart(name=start, by_launcher=start is not None))
        config = trainer_config(run)
        config.trainer.default_local_dir = str(tmp_path / "t/checkpoints" if start else folder)
        config.trainer.update({"resume_mode": "auto", "save_freq": 1, **trainer})
        config.algorithm.kl_ctrl.type = "adaptive"
        data = SimpleNamespace(position=0, batch_sampler=SimpleNamespace(sampler=None))
        data.state_dict, data.load_state_dict = lambda: data.position, lambda state: setattr(data, "position", state)
        parts = {"config": config, "actor_rollout_wg": Workers(), "train_dataloader": data, "global_steps": 0}
        said = []
        made = Saves(SimpleNamespace(**parts, total_training_steps=99), lambda *text: said.append(text))
        made.said = said
        return made

    return make


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.trainer.global_steps = checkpoints.trainer.train_dataloader.position = step
        checkpoints.save()
        checkpoints.finish()


def resumed(run):
    run.load()
    return run


def checkpoint_path(step, folder):
    return {"resume_mode": "resume_path", "resume_from_path": str(folder / f"global_step_{step}")}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


OTHER_MODEL = TINY.__class__(**{**vars(TINY), "n_routed_experts": 4})


@pytest.mark.parametrize(("model", "total", "file", "words"), [
    (OTHER_MODEL, 99, "trainer.json", r"its model differs from this run's: n_routed_experts 8 \(expected 4\)"),
    (TINY, 2, "trainer.json", "step 3 is complete.*trainer.total_training_steps"),  # total follows from the data
    (TINY, 3, "trainer.json", "step 3 is complete.*trainer.total_training_steps"),
    (TINY, 99, "trainer.pt", "it has no trainer.json"),  # a pickle is not read
    (TINY, 99, "trainer.safetensors", "an earlier version saved it.*weights export .*global_step_3 DIR"),
])  # fmt: skip
def test_what_cannot_be_gone_on_with_is_refused_before_workers_read_it(saves, tmp_path, model, total, file, words):
    save(saves(), 3)
    (tmp_path / "global_step_3/trainer.json").rename(tmp_path / "global_step_3" / file)
    run = saves(**checkpoint_path(3, tmp_path))
    run.model, run.trainer.total_training_steps = model, total
    with pytest.raises(ConfigError, match=words):
        run.load()
    assert run.trainer.actor_rollout_wg.loaded is None


def with_critic(run):
    run.trainer.use_critic, run.trainer.critic_wg = True, Workers()
    return run


def test_a_checkpoint_is_whole_with_its_critic_alone(saves, tmp_path):
    run = with_critic(saves())
    run.trainer.critic_wg.failing = True  # its ranks never write
    run.trainer.global_steps = run.trainer.train_dataloader.position = 1
    run.save()
    with pytest.raises(CheckpointError, match="disk full"):
        run.finish()
    run._aborted.set()
    run._thread.join()
    assert run.chain.checkpoints() == {}
    save(with_critic(saves()), 2)
    folder = tmp_path / "global_step_2"
    resumed(again := with_critic(saves(**checkpoint_path(2, tmp_path))))
    assert again.trainer.critic_wg.loaded == again.trainer.actor_rollout_wg.loaded == [2, 2]
    assert folder_problems(folder / "critic", read_manifest(folder / "critic")) == []
    with pytest.raises(ConfigError, match="it has a critic"):
        saves(**checkpoint_path(2, tmp_path)).load()
    other = json.loads((folder / "critic" / "manifest.json").read_text()) | {"identity": "another"}
    (folder / "critic" / "manifest.json").write_text(json.dumps({**other, "digest": content_digest(other)}))
    with pytest.raises(ConfigError, match="belongs to another checkpoint"):
        with_critic(saves(**checkpoint_path(2, tmp_path))).load()
    shutil.rmtree(folder / "critic")
    for load in (with_critic(saves(**checkpoint_path(2, tmp_path))).load, saves().chain.newest):
        with pytest.raises(ConfigError, match="critic"):
            load()
    save(saves(), 3)
    with pytest.raises(ConfigError, match="it has no critic"):
        with_critic(saves(**checkpoint_path(3, tmp_path))).load()


def test_an_error_of_a_writing_worker_stops_the_run_and_leaves_nothing_complete(saves, tmp_path):
    run = saves()
    save(run, 1)
    run.trainer.global_steps, run.trainer.actor_rollout_wg.failing = 2, True
    run.save()
    with pytest.raises(CheckpointError, match="rank 1: disk full"):
        run.finish()
    run.abort_save(wait=False)
    assert run.chain.newest() == tmp_path / "global_step_1"
    save(saves(), 2)
    assert names(tmp_path) == ["global_step_1", "global_step_2"]


@pytest.mark.parametrize(("wait", "least_s", "whole"), [(True, 900.0, True), (False, 900.0, False), (True, 0.0, False)])
def test_after_an_error_a_checkpoint_is_waited_for(saves, tmp_path, wait, least_s, whole):
    """Wait at most as long as the watch allows the controller without a call, and not if no rank writes any more."""
    run = saves()
    run.config.recipe.watch.least_s = least_s
    workers = run.trainer.actor_rollout_wg
    workers.failing = True  # its ranks write later
    run.trainer.global_steps = run.trainer.train_dataloader.position = 1
    run.save()
    folder = tmp_path / "global_step_1"

    def say(text, *at):
        run.said.append((text, *at))
        if least_s:
            workers.failing = False
            workers.save_checkpoint(str(folder), None, 1)

    run._say = say
    run.abort_save(wait)
    assert (run.chain.newest() == folder) is whole
    assert any("waiting for its checkpoint" in text for text, *_ in run.said) is wait


def test_a_save_without_space_writes_nothing_and_removes_what_killed_saves_left_first(saves, tmp_path, monkeypatch):
    run, left = saves(), tmp_path / "global_step_1"
    need = sum(run.run.checkpoint_bytes)
    left.mkdir()  # without a manifest: of a save that was killed
    monkeypatch.setattr(checkpoint, "free_bytes", lambda path: need - (1 if left.exists() else 0))
    save(run, 2)
    assert names(tmp_path) == ["global_step_2"]
    monkeypatch.setattr(checkpoint, "free_bytes", lambda path: need - 1)
    with pytest.raises(CheckpointError, match=r"global_step_3: expected .* free .*nothing was written.*max_actor_ckpt"):
        save(run, 3)
    assert names(tmp_path) == ["global_step_2"]
    left.mkdir()
    monkeypatch.setattr(checkpoint, "free_bytes", lambda path: need)  # control: exactly enough, so all is left as it is
    save(run, 4)
    assert names(tmp_path) == ["global_step_2", "global_step_4"]  # a complete save removes it


def test_a_checkpoint_that_the_run_waits_for_says_its_bytes(saves, tmp_path, monkeypatch):
    """Check that there is output for recipe.timeouts.quiet_s while ranks write, and none while the run goes on."""
    monkeypatch.setattr(checkpoint, "_SAID_S", 0.0)
    run, folder = saves(), tmp_path / "global_step_1"
    workers = run.trainer.actor_rollout_wg
    workers.failing = True  # its ranks have not written yet
    run.trainer.global_steps = run.trainer.train_dataloader.position = 1
    run.save()

    def finish_checkpoint():
        deadline = time.monotonic() + HANG_S
        while not run.said and time.monotonic() < deadline:
            time.sleep(0.01)
        workers.failing = False
        workers.save_checkpoint(str(folder), None, 1)

    monkeypatch.setattr(workers, "finish_checkpoint", finish_checkpoint)
    assert run.said == []
    run.finish()
    assert run.said[0][0].startswith("the run waits for its checkpoint in progress, ") and run.chain.newest() == folder


def test_no_rank_begins_an_update_before_all_have_written(saves, tmp_path):
    """Check that the call waits for the workers while files are missing, and that a worker's error is the run's."""
    run = saves()
    workers = run.trainer.actor_rollout_wg
    run.wait_before_update()  # nothing was saved
    assert workers.waits == 0
    workers.failing = True
    run.trainer.global_steps = run.trainer.train_dataloader.position = 1
    run.save()
    with pytest.raises(CheckpointError, match="rank 1: disk full"):
        run.wait_before_update()
    assert workers.waits == 1
    workers.failing = False
    run.abort_save(wait=False)
    run.wait_before_update()  # nobody writes any more
    assert workers.waits == 1


def test_a_coefficient_that_adapts_goes_on_where_it_was(saves, tmp_path):
    """Check verl's AdaptiveKLController; the control is a fixed one, with the configuration's value."""
    for adapts, expected in ((True, 0.25), (False, 0.001)):
        run, again = (saves(tmp_path / str(adapts)) for _ in range(2))
        for each, value in ((run, 0.25), (again, 0.001)):
            each.config.algorithm.use_kl_in_reward = adapts
            each.trainer.kl_ctrl_in_reward = SimpleNamespace(value=value)
        save(run, 1)
        again.load()
        assert again.trainer.kl_ctrl_in_reward.value == expected


def _killed_at(point, run, step):
    """Save in a process of its own, and kill it before the call number `point` that changes the disk."""
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
    writer.NewFile.write = before(writer.NewFile.write)
    save(run, step)
    os._exit(min(len(calls), 255))


def killed_at(point, run, step):
    process = multiprocessing.get_context("fork").Process(target=_killed_at, args=(point, run, step))
    process.start()
    process.join(HANG_S)
    return process.exitcode


@pytest.mark.slow
def test_a_save_that_is_killed_anywhere_leaves_a_complete_checkpoint(saves, tmp_path):
    """Kill at random points, and at the last ones, which write the manifest and remove; a new start must go on."""
    home, parent, good = tmp_path / "t", None, 1

    def next_run():
        name = take_start([home], parent, None)
        return saves(start=name, max_actor_ckpt_to_keep=1)

    save(run := next_run(), 1)
    points = killed_at(0, run, 2)
    assert points > 30
    good, parent = 2, ("0001", 2)
    chosen = sorted({*random.Random(0).sample(range(1, points + 1), KILLS), *range(points - 6, points + 1)})
    seen = set()
    for point in chosen:
        save(run := next_run(), good + 1)
        good += 1
        assert killed_at(point, run, good + 1) == -signal.SIGKILL
        newest = run.chain.newest()
        found = int(newest.name.rpartition("_")[2])
        parent = (newest.parents[1].name, found)
        again = next_run()
        again.config.trainer.update({"resume_mode": "resume_path", "resume_from_path": str(newest)})
        again.load()
        assert again.trainer.global_steps == found in (good, good + 1)
        assert again.trainer.actor_rollout_wg.loaded == [found] * 2, point
        seen.add(found - good)
        good = found + 1
        save(again, good)
        assert [path.name for path in home.glob("0*/checkpoints/*")] == [f"global_step_{good}"], point
        parent = (again.folder.parent.name, good)
    assert seen == {0, 1}  # the last points are after the manifest


def test_a_step_whose_save_was_killed_is_saved_again(saves, tmp_path):
    (tmp_path / "global_step_5").mkdir()
    (tmp_path / "global_step_5/rank_00007.safetensors").touch()
    save(run := saves(), 5)
    assert run.chain.newest() == tmp_path / "global_step_5"
    assert set(rank_file_names(2)) < set(names(tmp_path / "global_step_5")) and not list(tmp_path.rglob("*00007*"))


# ---- without a launcher: one folder, which a run goes on with or finds empty


def test_a_folder_that_another_run_saved_to_is_not_mixed_with_this_one(saves, tmp_path):
    save(saves(), 2, 4)
    for given, step in (({"resume_mode": "disable"}, 2), (checkpoint_path(2, tmp_path), 4)):
        with pytest.raises(ConfigError, match=f"holds global_step_{step} of another run.*resume_mode=auto"):
            saves(**given).load()
        saves(**given, save_freq=-1).load()  # a run that saves nothing is not refused
    assert names(tmp_path) == ["global_step_2", "global_step_4"]
    again = resumed(saves())
    assert (again.trainer.global_steps, again.trainer.train_dataloader.position) == (4, 4)
    assert again.trainer.actor_rollout_wg.loaded == [4, 4]
    assert any("step 4 is complete" in text for text, *at in again.said if at)
    first = resumed(saves(tmp_path / "new"))
    assert first.trainer.global_steps == 0 and "no complete checkpoint" in first.said[-1][0]


def test_an_old_checkpoint_that_cannot_be_removed_is_named_and_ends_nothing(saves, tmp_path, monkeypatch):
    rmtree = shutil.rmtree

    def busy(path, *args, **kwargs):
        if str(path).endswith("global_step_1"):
            raise OSError(39, "Directory not empty")
        rmtree(path, *args, **kwargs)

    run = saves(max_actor_ckpt_to_keep=1)
    save(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        save(run, 2, 3)
    assert run.chain.newest() == tmp_path / "global_step_3"
    assert any("cannot be removed" in text for text, *_ in run.said)
    save(run, 4)
    assert names(tmp_path) == ["global_step_4"]


def test_bytes_that_only_workers_compare_name_the_next_older_checkpoint(saves, tmp_path):
    save(saves(), 4, 6)
    run = saves()
    run.trainer.actor_rollout_wg.fault = f"{tmp_path}/global_step_6/rank_00001.safetensors: sha256"
    with pytest.raises(CheckpointError, match=r"global_step_6/rank_00001(.|\n)*resume_from_path=.*global_step_4$"):
        run.load()


# ---- the state of the data


def loader(workers=0, sampler=None):
    data, generator = list(range(40)), torch.Generator().manual_seed(3)
    sampler = sampler or RandomSampler(data, generator=generator)
    return StatefulDataLoader(data, batch_size=4, num_workers=workers, sampler=sampler)


def draw():
    return [random.random(), np.random.rand(), torch.rand(()).item()]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_gets_the_batches_and_random_numbers_that_come_next(saves, tmp_path, workers):
    run = saves()
    run.trainer.train_dataloader = loader(workers)
    run.load()  # checks that the state can be saved, without drawing a batch
    batches = iter(run.trainer.train_dataloader)
    first = [next(batches).tolist() for _ in range(2)]
    assert first == [batch.tolist() for batch, _ in zip(loader(workers), range(2), strict=False)]
    run.trainer.global_steps = 2
    run.save()
    run.finish()
    drawn = draw()
    rest = [batch.tolist() for batch in batches]
    folder = tmp_path / "global_step_2"
    assert "trainer.json" in names(folder) and not list(folder.glob("*.pt"))
    again = saves()
    again.trainer.train_dataloader = loader(workers)
    again.load()
    assert draw() == drawn
    assert [batch.tolist() for batch in again.trainer.train_dataloader] == rest


def drawn(loader):
    while True:
        yield from (batch.tolist() for batch in loader)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_in_any_pass_over_the_data_goes_on_in_the_order_of_verl(workers, drop_last):
    """Compare with verl's order; the control: with torch's own sampler the order in later passes differs."""

    def made(ours):
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(range(10), generator=generator)
        found = StatefulDataLoader(range(10), batch_size=4, num_workers=workers, sampler=sampler, drop_last=drop_last)
        if ours:
            checkpoint._use_resumable_sampler(found)
        return found

    per_pass = 2 if drop_last else 3
    steps = 3 * per_pass
    whole = [*itertools.islice(drawn(made(False)), steps + 2)]
    wrong = []
    for ours, stop in itertools.product([True, False], range(steps + 1)):
        loader = made(ours)
        assert [*itertools.islice(drawn(loader), stop)] == whole[:stop]
        state, again = copy.deepcopy(loader.state_dict()), made(ours)
        again.load_state_dict(state)
        again.state_dict()  # as Checkpoints does
        if [*itertools.islice(drawn(again), 2)] != whole[stop : stop + 2]:
            wrong.append((ours, stop))
    assert wrong and not any(ours for ours, _ in wrong), wrong


def kept_loader(rows):
    """Return a loader as Checkpoints makes it from verl's, which leaves out an incomplete last batch."""
    sampler = RandomSampler(range(rows), generator=torch.Generator().manual_seed(3))
    found = StatefulDataLoader(range(rows), batch_size=4, sampler=sampler, drop_last=True)
    checkpoint._use_resumable_sampler(found)
    return found


def test_a_run_that_resumes_after_each_step_has_the_order_of_the_uninterrupted_one():
    """Save a resumed pass once more: its state counts the samples that were drawn before the resume too."""
    whole, state, found = [*itertools.islice(drawn(kept_loader(16)), 9)], None, []
    for _ in whole:
        loader = kept_loader(16)
        if state is not None:
            loader.load_state_dict(state)
        found.append(next(iter(loader)).tolist())  # after 4 steps, the first batch of the next pass
        state = copy.deepcopy(loader.state_dict())
    assert found == whole


class Sampler(SequentialSampler):
    """Sample with a state of its own."""

    def __init__(self, value):
        super().__init__(range(40))
        self.value = value

    def state_dict(self):
        return {"mine": {"seen": [1, self.value]}}

    def load_state_dict(self, state):
        self.value = state["mine"]["seen"][1]


@pytest.mark.parametrize("value", [torch.arange(3), (1, 2), {1: 2}])
def test_a_state_that_is_not_json_is_refused_before_the_first_step(saves, tmp_path, value):
    run = saves()
    run.trainer.train_dataloader = loader(sampler=Sampler(value))
    with pytest.raises(ConfigError, match=r"state_dict\(\) of the data loader"):
        run.load()
    assert names(tmp_path) == []
    saves(save_freq=-1).load()  # control: it would never be saved
    assert loader_state(loader(sampler=Sampler({"a": [2.5, {"b": None}], "c": "text", "e": 1 << 70})))
