"""Record and replay of rollouts with verl's own DataProto and a worker group that only generates."""

import pytest
import torch
from verl import DataProto

from verl_patches.errors import ConfigError
from verl_patches.trainer.recording import find_recording
from verl_patches.trainer.rollout_recorder import RolloutRecorder


class Group:
    """Generates two responses a prompt; counts its calls."""

    world_size, calls = 2, 0

    def generate_sequences(self, prompts):
        self.calls += 1
        ids = prompts.batch["input_ids"].repeat_interleave(2, 0)
        more = {"rollout_log_probs": torch.zeros(ids.shape), "sample": torch.arange(len(ids))}
        return DataProto.from_dict({"prompts": ids, "responses": ids + self.calls, **more})

    def update_actor(self, batch):
        return "updated"


def prompts(start=0, **meta):
    return DataProto.from_dict({"input_ids": torch.arange(start, start + 6).reshape(2, 3)}, meta_info=meta)


def recorder(folder, replay=None, stages=None):
    """(recorder, its group)."""
    group = Group()
    return RolloutRecorder(group, folder / "rollouts", replay, ([] if stages is None else stages).append), group


def test_recorded_responses_come_back_without_generating(tmp_path):
    stages = []
    group, _ = recorder(tmp_path, stages=stages)
    first, second = group.generate_sequences(prompts()), group.generate_sequences(prompts(6))
    assert group.world_size == 2 and group.update_actor(None) == "updated"
    assert stages == ["generate_sequences", "reward", "generate_sequences", "reward", "update_actor"]
    replayed, player = recorder(tmp_path, find_recording(str(tmp_path)))
    for original, start in ((first, 0), (second, 6)):
        again = replayed.generate_sequences(prompts(start))
        assert torch.equal(again.batch["responses"], original.batch["responses"])
        assert set(again.batch.keys()) == {"prompts", "responses"}  # not sample, of a run with the tensor cache
    assert player.calls == 0
    with pytest.raises(ConfigError, match="fewer steps.*--steps 2"):
        replayed.generate_sequences(prompts())
    with pytest.raises(ConfigError, match="recorded with other prompts"):
        recorder(tmp_path, find_recording(str(tmp_path)))[0].generate_sequences(prompts(1))


@pytest.mark.parametrize("meta", [{"validate": True}, {"do_sample": False}])
def test_validation_and_greedy_baselines_are_neither_counted_nor_recorded(tmp_path, meta):
    group, _ = recorder(tmp_path)
    group.generate_sequences(prompts(**meta))
    assert not (tmp_path / "rollouts").exists()
    group.generate_sequences(prompts())
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_1.safetensors"]


def test_without_a_folder_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RolloutRecorder(Group(), None, None, lambda name: None).generate_sequences(prompts())
    assert list(tmp_path.iterdir()) == []


def test_a_recording_is_accepted_as_run_folder_or_file_and_refused_elsewhere(tmp_path):
    recorder(tmp_path)[0].generate_sequences(prompts())
    folder = tmp_path / "rollouts"
    assert {find_recording(str(p)) for p in (tmp_path, folder, folder / "step_1.safetensors")} == {folder.resolve()}
    assert find_recording(None) is None and find_recording(str(tmp_path), 1)
    with pytest.raises(ConfigError, match=r"has 1 step\(s\), this run wants 3; ask for --steps 1"):
        find_recording(str(tmp_path), 3)
    with pytest.raises(ConfigError, match="no step_1.safetensors"):
        find_recording(str(tmp_path / "elsewhere"))
