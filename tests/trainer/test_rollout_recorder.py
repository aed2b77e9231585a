"""Record and replay of rollouts with verl's own DataProto and a worker group that only generates."""

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.trainer.recording import find_recording
from verl_patches.trainer.rollout_recorder import RolloutRecorder

verl = pytest.importorskip("verl")


class Group:
    """Generates two responses a prompt; counts how often it was asked."""

    world_size = 2

    def __init__(self):
        self.asked = 0

    def generate_sequences(self, prompts):
        self.asked += 1
        ids = prompts.batch["input_ids"].repeat_interleave(2, 0)
        return verl.DataProto.from_dict(
            {
                "prompts": ids,
                "responses": ids + self.asked,
                "rollout_log_probs": torch.zeros(ids.shape),
                "sample": torch.arange(len(ids)),
            }
        )

    def update_actor(self, batch):
        return "updated"


def prompts(start=0):
    return verl.DataProto.from_dict({"input_ids": torch.arange(start, start + 6).reshape(2, 3)})


def tap(folder, group, replay=None, calls=None):
    return RolloutRecorder(group, folder / "rollouts", replay, (calls if calls is not None else []).append)


def test_recorded_responses_come_back_without_generating(tmp_path):
    calls, recorder = [], Group()
    group = tap(tmp_path, recorder, calls=calls)
    first, second = group.generate_sequences(prompts()), group.generate_sequences(prompts(6))
    assert group.world_size == 2 and group.update_actor(None) == "updated"
    assert calls == ["generate_sequences", "reward", "generate_sequences", "reward", "update_actor"]

    player = Group()
    replayed = tap(tmp_path, player, find_recording(str(tmp_path)))
    for original, start in ((first, 0), (second, 6)):
        found = replayed.generate_sequences(prompts(start))
        assert torch.equal(found.batch["responses"], original.batch["responses"])
        assert "sample" in original.batch.keys()  # of a run with the tensor cache
        assert set(found.batch.keys()) == {"prompts", "responses"}
    assert player.asked == 0
    with pytest.raises(ConfigError, match="fewer steps.*--steps 2"):
        replayed.generate_sequences(prompts())


@pytest.mark.parametrize("said", [{"validate": True}, {"do_sample": False}])
def test_validation_and_greedy_baselines_are_neither_counted_nor_recorded(tmp_path, said):
    group = tap(tmp_path, Group())
    check = prompts()
    check.meta_info.update(said)
    group.generate_sequences(check)
    assert not (tmp_path / "rollouts").exists()
    group.generate_sequences(prompts())
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_1.safetensors"]


def test_nothing_is_recorded_when_not_asked_for(tmp_path):
    RolloutRecorder(Group(), None, None, lambda name: None).generate_sequences(prompts())
    assert list(tmp_path.iterdir()) == []


def test_other_prompts_are_refused(tmp_path):
    tap(tmp_path, Group()).generate_sequences(prompts())
    with pytest.raises(ConfigError, match="recorded with other prompts"):
        tap(tmp_path, Group(), find_recording(str(tmp_path))).generate_sequences(prompts(1))


def test_recording_is_found_by_run_folder_or_file_and_refused_elsewhere(tmp_path):
    tap(tmp_path, Group()).generate_sequences(prompts())
    folder = tmp_path / "rollouts"
    assert {find_recording(str(p)) for p in (tmp_path, folder, folder / "step_1.safetensors")} == {folder.resolve()}
    assert find_recording(None) is None
    assert find_recording(str(tmp_path), 1)
    with pytest.raises(ConfigError, match=r"has 1 step\(s\), this run wants 3; ask for --steps 1"):
        find_recording(str(tmp_path), 3)
    with pytest.raises(ConfigError, match="no step_1.safetensors"):
        find_recording(str(tmp_path / "elsewhere"))
