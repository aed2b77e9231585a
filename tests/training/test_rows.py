"""Each row around verl's trainer and workers has its effect, and the effect is gone when the row is switched off."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_patches.patching.switches import parse

HERE = Path(__file__).resolve().parent
IDS = [
    "update.fit_as_run", "update.recipe_worker", "update.on_policy", "update.log_with_run", "logprob.truth_check",
    "platform.tensordict_cuda", "platform.pickle_torch_config", "update.sharding_manager", "reshard.direct",
    "model.train_dtype", "model.optimizer_dtype", "memory.swap_optimizer", "memory.order", "memory.empty_cache",
    "update.micro_batches_as_planned", "dispatch.put_once", "dispatch.note_starts",
]


@pytest.fixture
def probe(warm):
    return functools.partial(_probe, warm)


def _probe(warm, switches):
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(HERE.parents[1]), "VERL_PATCHES": switches, "VLLM_USE_V1": "0",
           "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-X", "warm", str(HERE / "probe_rows.py")]
    done = subprocess.run(command, env=warm(env), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_rows_have_their_effect(probe):
    assert probe("line=pypi,platform=cpu") == dict.fromkeys(IDS, True)


@pytest.mark.slow
def test_without_the_rows_the_effect_is_gone(probe):
    text = ",".join(["line=pypi,platform=cpu", *(f"-{name}" for name in IDS)])
    assert parse(text).text() == text
    assert probe(text) == dict.fromkeys(IDS, False)
