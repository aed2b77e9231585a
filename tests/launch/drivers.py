"""Drivers of the tests: code that stands in the place of verl's, and the configuration that they get."""

import functools

from verl_patches.config.compose import compose

NAME = "deepseekv3_tiny_cpu"
FOLDER = """import os, json, subprocess, sys, time; from pathlib import Path
out = Path(os.environ['TENSORBOARD_DIR']).parent
"""
STEP = {"step": 1, "reward": 0.5, "seconds": {"rollout": 1.0}}
SUMMARY = f'{FOLDER}(out / "summary.json").write_text(json.dumps({{"run": "t", "steps": [{STEP}], "exit": "ok"}}))\n'
# a daemon as Ray starts them: a session of its own, its parent gone, SIGTERM ignored
DETACHED = f"""{FOLDER}
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
(out / "child.pid").write_text(str(child.pid))
"""
# until the launcher has measured what runs now (`start` of conftest.py)
MEASURED = '(out / "ready").touch()\nwhile not (out / "gate").exists(): time.sleep(0.02)\n'
SLEEP = "time.sleep(600)\n"


@functools.cache
def composed():
    return compose(NAME)
