"""Where recorded rollouts lie, found before a run starts. No torch here."""

from __future__ import annotations

from pathlib import Path

from verl_patches.errors import ConfigError


def find_recording(path: str | None, steps: int | None = None) -> Path | None:
    """The folder of step_N.safetensors that a user names: itself, a run's folder, or one of its files; None for None.

    Raises ConfigError where there is none, or where it holds fewer than `steps` steps.
    """
    if path is None:
        return None
    given = Path(path)
    folders = [f for f in (given, given / "rollouts", given.parent) if (f / "step_1.safetensors").is_file()]
    if not folders:
        raise ConfigError(
            f"--replay-rollout {path}: no step_1.safetensors there; give a run folder (outputs/<run>) "
            "that recorded its rollouts"
        )
    if steps is not None and not (folders[0] / f"step_{steps}.safetensors").is_file():
        found = len(list(folders[0].glob("step_*.safetensors")))
        raise ConfigError(
            f"--replay-rollout {path}: the recording has {found} step(s), this run wants {steps}; ask "
            f"for --steps {found}, or record a longer run"
        )
    return folders[0].resolve()
