"""Provide drivers for tests, code in place of verl's, and the configuration that they get."""

from tests.runs import composed
from verl_patches.run.resolve import changed_run
from verl_patches.spec import RunSpec

NAME = "deepseekv3_tiny_cpu"
FOLDER = """import os, json, subprocess, sys, time; from pathlib import Path
out = Path(os.environ['TENSORBOARD_DIR']).parent
"""
STEP = {"step": 1, "reward": 0.5, "seconds": {"rollout": 1.0}}
SUMMARY = f'{FOLDER}(out / "summary.json").write_text(json.dumps({{"run": "t", "steps": [{STEP}], "exit": "ok"}}))\n'
# A daemon as Ray starts them: a session of its own, its parent gone, SIGTERM ignored.
DETACHED = f"""{FOLDER}
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
(out / "child.pid").write_text(str(child.pid))
"""
# Waits until the launcher has noted the running processes (`start` of conftest.py).
MEASURED = '(out / "ready").touch()\nwhile not (out / "gate").exists(): time.sleep(0.02)\n'
SLEEP = "time.sleep(600)\n"


def run_named_t(output_root, recipe=(), trainer=()) -> RunSpec:
    """Return run t of the tiny configuration below `output_root`, with other keys of recipe and of verl's trainer."""
    keys = {
        f"recipe.{key}": value for key, value in {"output_root": str(output_root), "run": "t", **dict(recipe)}.items()
    }
    return changed_run(_TINY, keys | {f"trainer.{key}": value for key, value in dict(trainer).items()})


_TINY = composed(NAME)
