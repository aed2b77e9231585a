"""Between trainer and workers: keep every step's responses, or give back recorded ones instead of generating.

Recorded: outputs/<run>/rollouts/step_N.safetensors with prompts [B, S_prompt] and responses [B, S_response] (int64),
masks and, when vLLM gave them and they came to the trainer, which they do not with recipe.tensor_cache, log-probs.
Replay trains on the same responses at another layout, so that gradients can be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from verl_patches.errors import ConfigError

SAMPLE = "sample"  # [B] int64, of trainer/tensor_cache.py: a row's place in the batch as generated


class RolloutRecorder:
    """A worker group that records generate_sequences, or replays it; every other call goes through."""

    def __init__(self, group: Any, record_to: Path | None, replay_from: Path | None, on_call: Any):
        self._group, self._record_to, self._replay_from = group, record_to, replay_from
        self._on_call = on_call
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
            self._on_call(name)
        return found

    def generate_sequences(self, prompts: Any) -> Any:
        """The responses of this step (verl's DataProto), from vLLM or from the recording.

        Validation and REMAX's greedy baseline go through.
        """
        if prompts.meta_info.get("validate") or not prompts.meta_info.get("do_sample", True):
            return self._group.generate_sequences(prompts)
        self._step += 1
        self._on_call("generate_sequences")
        if self._replay_from is not None:
            return self._replay(prompts)
        output = self._group.generate_sequences(prompts)
        if self._record_to is not None:
            self._record_to.mkdir(parents=True, exist_ok=True)
            tensors = {key: value.contiguous() for key, value in output.batch.items() if key != SAMPLE}
            save_file(tensors, self._record_to / f"step_{self._step}.safetensors")
        self._on_call("reward")
        return output

    def _replay(self, prompts: Any) -> Any:
        from verl import DataProto

        path = self._replay_from / f"step_{self._step}.safetensors"
        if not path.is_file():
            raise ConfigError(
                f"--replay-rollout: {path} does not exist; the recording has fewer steps than asked for. "
                f"Ask for --steps {self._step - 1}, or record a longer run"
            )
        tensors = load_file(path)
        tensors.pop("rollout_log_probs", None)  # belong to the weights of the recorded run
        asked, found = prompts.batch["input_ids"], tensors["prompts"]
        repeats = found.shape[0] // max(asked.shape[0], 1)
        same = found.shape == (asked.shape[0] * repeats, asked.shape[1])
        if not same or not torch.equal(asked.repeat_interleave(repeats, 0), found):
            raise ConfigError(
                f"--replay-rollout: {path} was recorded with other prompts ({tuple(found.shape)}, now "
                f"{tuple(asked.shape)} x {repeats}); use the recorded run's data, batch size and seed"
            )
        return DataProto.from_dict(tensors=tensors, meta_info=dict(prompts.meta_info))
