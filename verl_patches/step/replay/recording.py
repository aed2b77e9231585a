"""Write and read recorded rollouts (folder rollouts/ of each start of a run), for a replay or to make data.

step_N.safetensors holds prompts [B, S_prompt] and responses [B, S_response] (int64), their masks and, if vLLM gave them
to the trainer, log-probs. A replay trains on the same responses at another layout, so that gradients can be compared.
scores_N.safetensors, written with the step's update, holds for the same rows `uid` [B, 16] (uint8, verl's UUID of the
prompt's group), `score` [B] (fp32, the reward), reward/LABEL [B] of each part and, where the run compares log-probs,
dlogp/mean and dlogp/max [B]; its metadata has TEXT_COLUMNS as JSON. tools/data/ reads it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.shared_files import replacing
from verl_patches.values import loading_errors
from verl_patches.weights.run_folders import chain_steps, find_start, require_start

if TYPE_CHECKING:  # the launcher looks for a recording without importing torch
    import torch

ROLLOUTS = "rollouts"  # in the folder of a start
TEXT_COLUMNS, TEXT_CHARACTERS = ("gold", "data_source"), 1000  # of a gold answer, which may be a program, the beginning
Recording = Mapping[int, Path]  # step -> the folder with its step_N.safetensors


def recording_in(start: Path) -> Recording:
    """Return the recorded steps of a start and of the starts that it continues, in order."""
    return chain_steps(require_start(start), lambda folder: _steps_in(folder / ROLLOUTS))


def _steps_in(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step_*.safetensors"):
        if path.stem[5:].isdecimal():
            yield int(path.stem[5:]), folder


def find_recording(path: str, steps: int | None = None, option: str = "--replay-rollout") -> Recording:
    """Return the recording that a user names: a run, a start, a folder of rollouts or one of its files.

    Raises ConfigError if there is none, or, with `steps`, if one of the steps 1 to `steps` is missing.
    """
    named = Path(path)
    folder = next((f for f in (named, named.parent) if (f / "step_1.safetensors").is_file()), None)
    try:
        found = dict(_steps_in(folder.resolve())) if folder else recording_in(find_start(named, named.parent))
    except ConfigError:
        found = {}
    if not found:
        raise ConfigError(
            f"{option} {path}: no step_1.safetensors there; give a run (outputs/NAME or outputs/NAME/0001) "
            "that recorded its rollouts (recipe.rollout.record)"
        )
    if missing := [step for step in range(1, (steps or 0) + 1) if step not in found]:
        raise ConfigError(
            f"--replay-rollout {path}: the recording has {missing[0] - 1} step(s), this run has {steps}; use "
            f"--steps {missing[0] - 1}, or record a longer run"
        )
    return found


def recorded_lengths(path: str, steps: int = 10) -> tuple[list[int], list[int]]:
    """Return prompt lengths and sorted response lengths of a run's last recorded steps.

    Raises ConfigError if there are none, or one is damaged.
    """
    from safetensors import safe_open

    found = find_recording(path, option="--lengths")
    last = [found[step] / f"step_{step}.safetensors" for step in sorted(found)[-steps:]]
    prompts, responses = [], []
    for file in last:
        with loading_errors(f"{file}: expected a recorded step"), safe_open(file, "numpy") as tensors:
            width, mask = tensors.get_slice("prompts").get_shape()[1], tensors.get_tensor("attention_mask")
        prompts += mask[:, :width].sum(1).tolist()
        responses += mask[:, width:].sum(1).tolist()
    return prompts, sorted(responses)


def save_step(folder: Path, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors of one step."""
    _save(folder / f"step_{step}.safetensors", tensors)


def save_scores(folder: Path, step: int, rows: torch.Tensor, scores: torch.Tensor, columns: Mapping[str, Any]) -> None:
    """Write the rewards of a step's responses.

    rows: [B], the place of each row in the recorded step; scores: [B]; columns: of B values, `uid`, TEXT_COLUMNS where
    they are known, and numbers.
    """
    import torch

    uids = bytearray(b"".join(uuid.UUID(uid).bytes for uid in columns["uid"]))
    made = {"score": scores.float(), "uid": torch.frombuffer(uids, dtype=torch.uint8).view(-1, 16)}
    for name in columns.keys() - {"uid", *TEXT_COLUMNS}:
        made[name] = torch.tensor([float(value) for value in columns[name]])
    order, texts = rows.argsort(), {}
    for name in (name for name in TEXT_COLUMNS if name in columns):
        values = dict(zip(columns["uid"], columns[name], strict=True))  # a prompt's responses have one
        shown = {uid: None if value is None else str(value)[:TEXT_CHARACTERS] for uid, value in values.items()}
        texts[name] = json.dumps({uuid.UUID(uid).hex: text for uid, text in shown.items()}, ensure_ascii=False)
    _save(folder / f"scores_{step}.safetensors", {name: values[order] for name, values in made.items()}, texts)


def load_rows(folder: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield each response of a step whose rewards are recorded, in the order in which they were sampled.

    {prompt, response: ids; cut: whether the response ends at the length limit; uid: hexadecimal; the other columns of
    scores_N.safetensors by name}. Raises ConfigError for a file that is damaged or lacks a tensor.
    """
    from safetensors import safe_open

    sampled, scores = (folder / f"{name}_{step}.safetensors" for name in ("step", "scores"))
    with (
        loading_errors(f"{sampled}: expected a recorded step (record the run again)"),
        safe_open(sampled, "pt") as file,
    ):
        prompts, responses, masks = map(file.get_tensor, ("prompts", "responses", "attention_mask"))
    with loading_errors(f"{scores}: expected recorded rewards (record the run again)"), safe_open(scores, "pt") as file:
        columns = {name: file.get_tensor(name).tolist() for name in file.keys()}
        uids = [bytes(uid).hex() for uid in columns.pop("uid")]
        for name, text in (file.metadata() or {}).items():
            by_uid = json.loads(text)
            columns[name] = [by_uid[uid] for uid in uids]
    width, longest = prompts.shape[1], responses.shape[1]
    for row, mask in enumerate(masks.bool()):
        ids = {"prompt": prompts[row][mask[:width]].tolist(), "response": responses[row][mask[width:]].tolist()}
        found = {name: values[row] for name, values in columns.items()}
        yield {**ids, "cut": len(ids["response"]) == longest, "uid": uids[row], **found}


def _save(path: Path, tensors: Mapping[str, torch.Tensor], texts: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new, texts)


def load_step(recording: Recording, step: int, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of one recorded step, without log-probs, which belong to the weights of the recorded run.

    input_ids: [B / n, S_prompt], this run's prompts. Raises ConfigError for a missing step or other prompts.
    """
    from safetensors.torch import load_file

    if step not in recording:
        raise ConfigError(f"--replay-rollout: step {step} is not recorded; the recording ends at {max(recording)}")
    path = recording[step] / f"step_{step}.safetensors"
    tensors = load_file(path)
    tensors.pop("rollout_log_probs", None)
    prompts, count = tensors["prompts"], max(len(input_ids), 1)
    repeats = len(prompts) // count
    if prompts.shape != (count * repeats, input_ids.shape[1]) or not prompts.equal(
        input_ids.repeat_interleave(repeats, 0)
    ):
        raise ConfigError(
            f"--replay-rollout: {path} was recorded with other prompts ({tuple(prompts.shape)}, now "
            f"{tuple(input_ids.shape)} x {repeats}); use the recorded run's data, batch size and seed"
        )
    return tensors
