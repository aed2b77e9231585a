"""Test that the loggers of trainer.logger are checked before a start, and write into the run's folder."""

import importlib.util
from types import SimpleNamespace

import pytest

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.run.environment import environment_variables
from verl_patches.run.record.loggers import LOGGERS, require_loggers


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Make the packages of all loggers found, and the home folder empty; return it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=name))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_logger_without_its_package_is_refused(monkeypatch, tmp_path):
    require_loggers(["console", "tensorboard"], {})
    for logger in ("wandb", "swanlab"):  # neither is among the requirements
        (tmp_path / logger).mkdir()
        with pytest.raises(ConfigError, match=f"trainer.logger has {logger}: expected the package {logger} .*install"):
            require_loggers(["console", logger], {})
        monkeypatch.syspath_prepend(tmp_path)  # the second one is found as a folder


@pytest.mark.parametrize(("name", "given", "login"), [
    ("wandb", {"WANDB_MODE": "offline"}, "machine api.wandb.ai login user password x"),
    ("wandb", {"WANDB_API_KEY": "x"}, "machine api.wandb.ai login user password x"),
    ("swanlab", {"SWANLAB_MODE": "local"}, "machine api.swanlab.cn"),
    ("clearml", {"CLEARML_API_ACCESS_KEY": "x"}, "api {}"),
])  # fmt: skip
def test_a_logger_without_its_key_is_refused(installed, name, given, login):
    with pytest.raises(ConfigError, match=f"trainer.logger has {name}: expected {LOGGERS[name].key} .*found none; exp"):
        require_loggers(name, {})
    require_loggers(name, given)
    file = installed / LOGGERS[name].login
    file.parent.mkdir(exist_ok=True)
    file.write_text(login)
    require_loggers(name, {})


def test_loggers_write_into_the_runs_folder(monkeypatch):
    run = composed("deepseekv3_tiny_cpu", ["trainer.logger=[wandb,swanlab,mlflow]"])
    names = [logger.folder[0] for logger in LOGGERS.values() if logger.folder]
    found = {v.name: v.value for v in environment_variables(run) if v.name in names}
    assert len(found) == 4 and all(str(run.folder) in value for value in found.values())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:password@server")  # kept, and in no record of the run
    assert "MLFLOW_TRACKING_URI" not in {v.name for v in environment_variables(run)}
    plain = composed("deepseekv3_tiny_cpu")
    assert [v.name for v in environment_variables(plain) if v.name in names] == ["TENSORBOARD_DIR"]
