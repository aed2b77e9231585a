"""Check the loggers of trainer.logger before a run starts, and say where each one writes.

verl makes them after the workers have loaded their models (verl.utils.tracking.Tracking.__init__).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from verl_patches.errors import ConfigError

_KEYLESS_MODES = ("offline", "local", "disabled")


class Logger(NamedTuple):
    """Describe a logger: its package, (variable, value) for where it writes, with {} for the run's folder, and its key.

    key: a variable; login: a file of the home folder that may have the key in place of it; mode: the variable that, at
    one of _KEYLESS_MODES, makes a key unnecessary.
    """

    package: str
    folder: tuple[str, str] | None = None
    key: str = ""
    mode: str = ""
    login: str = ""


LOGGERS = {
    "tensorboard": Logger("tensorboard", ("TENSORBOARD_DIR", "{}/tensorboard")),
    "wandb": Logger("wandb", ("WANDB_DIR", "{}"), "WANDB_API_KEY", "WANDB_MODE", ".netrc"),
    "swanlab": Logger(
        "swanlab", ("SWANLAB_LOG_DIR", "{}/swanlog"), "SWANLAB_API_KEY", "SWANLAB_MODE", ".swanlab/.netrc"
    ),
    "mlflow": Logger("mlflow", ("MLFLOW_TRACKING_URI", "sqlite:///{}/mlflow.db")),
    "clearml": Logger("clearml", key="CLEARML_API_ACCESS_KEY", login="clearml.conf"),
    "vemlp_wandb": Logger("volcengine_ml_platform", key="VOLC_ACCESS_KEY_ID"),
}


def chosen_loggers(given: str | Iterable[str]) -> dict[str, Logger]:
    """Return the loggers of a trainer.logger, by name, without `console`, which needs nothing."""
    names = [given] if isinstance(given, str) else given
    return {name: LOGGERS[name] for name in names if name in LOGGERS}


def require_loggers(given: str | Iterable[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError where a process with the variables `environ` lacks the package or the key of a logger."""
    for name, logger in chosen_loggers(given).items():
        package = importlib.util.find_spec(logger.package)
        if package is None or package.origin is None:  # without: a folder of that name, such as wandb makes
            expected, todo = f"the package {logger.package} in this Python", "install it"
        elif not logger.key or environ.get(logger.key) or environ.get(logger.mode) in _KEYLESS_MODES:
            continue
        elif os.path.isfile(os.path.expanduser(f"~/{logger.login}")):
            continue
        else:
            expected = f"{logger.key} or ~/{logger.login}" if logger.login else logger.key
            todo = f"export {logger.key}" + (f" or {logger.mode}=offline" if logger.mode else "")
        raise ConfigError(f"trainer.logger has {name}: expected {expected}, found none; {todo}, or remove {name}")
