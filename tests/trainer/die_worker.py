"""Workers that say which die Ray gave them and when they knew, and the program that starts Ray and asks them.

No device is needed: Ray sets ASCEND_RT_VISIBLE_DEVICES for actors that ask for its resource NPU. `verl` is an empty
package on PYTHONPATH, as only when it is imported matters here.
"""

import os
import sys
import time
import types

import verl  # noqa: F401  (as verl's worker module does: loading the class imports it)

from verl_patches.errors import ConfigError
from verl_patches.platform import npu
from verl_patches.trainer import ray_start

AT_IMPORT = os.environ.get(npu.VISIBLE)
VERLS = {"RANK": "0", "WG_PREFIX": "abc"}  # what marks a worker of verl's


class Asked:
    """An actor of verl's worker group, as far as this goes."""

    def __new__(cls):  # as verl's Worker: Ray then handles a class that cannot be loaded in another way
        return super().__new__(cls)

    def tell(self, visible=1, moved=None):
        """What this process knows of its die. The runtime sees `visible` devices; `moved` sets the variable."""
        if moved:
            os.environ[npu.VISIBLE] = moved
        try:
            refused = npu.check_visible_die(visible)
        except ConfigError as error:
            refused = str(error)
        return {
            "at hook": os.environ["AT_HOOK"],
            "at import": AT_IMPORT,
            "now": os.environ.get(npu.VISIBLE),
            "prepared": os.environ.get("PREPARED"),
            "refused": refused,
        }


def hook():
    """The user's set-up hook, pickled by value: workers must not import this module, and verl with it, so early."""

    def note():
        """Where FAIL says so, it fails, or the class does when it is loaded."""
        from verl_patches.patching.hooks import after_import

        def prepare(engine):
            os.environ["PREPARED"] = f"{engine['layers']} {os.environ.get(npu.VISIBLE)}"

        def fail(_=None):
            raise ConfigError(f"row a.b: has drifted at {time.time()}")

        engine_start = types.ModuleType("verl_patches.model.mindspeed.start")  # it needs MindSpeed
        engine_start.prepare = prepare
        sys.modules[engine_start.__name__] = engine_start
        os.environ["AT_HOOK"] = repr(os.environ.get(npu.VISIBLE))
        if os.environ.get("FAIL") == "hook":
            fail()
        if os.environ.get("FAIL") == "class":
            after_import(__name__, fail)

    return note


def start():
    """Ray with two pretended dies; (makes an actor of Asked, task that sleeps)."""
    import ray

    ray_start.start(
        {"VERL_PATCHES": os.environ["VERL_PATCHES"]},
        {"layers": 4},
        num_cpus=4,
        resources={"NPU": 2},
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={ray_start.HOOK: hook()},
    )
    asked = ray.remote(Asked)

    def worker(npus=1, **env):
        return asked.options(
            num_cpus=0, resources={"NPU": npus} if npus else {}, runtime_env={"env_vars": {**VERLS, **env}}
        ).remote()

    return worker, ray.remote(num_cpus=1)(lambda seconds: time.sleep(seconds))


def ask():
    """{case: what that worker says of its die}, and what a wait gives after actors were ended on purpose."""
    import ray

    worker, wait = start()
    first, second = worker(), worker()
    told = {"first": first.tell.remote(), "second": second.tell.remote()}
    told = {name: ray.get(answer) for name, answer in told.items()}
    told["runtime came first"] = ray.get(first.tell.remote(visible=16))
    told["moved"] = ray.get(first.tell.remote(moved="7"))
    ray.kill(first)
    ray.kill(second)
    free = worker(RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES="1")
    told["not set"] = ray.get(free.tell.remote())
    without = worker(npus=0)
    told["no die"] = ray.get(without.tell.remote())
    ended = ray_start.result_of(wait.remote(3))
    ray.shutdown()
    return told, ended


def fail(kind):
    """(when a wait of 100 s ended, its error) where a worker fails in its hook, or when its class is loaded."""
    import ray

    worker, wait = start()
    failing = worker(npus=0, FAIL=kind)
    try:
        ended = ray_start.result_of(wait.remote(100))
    except RuntimeError as error:
        ended = str(error)
    when = time.time()
    del failing
    ray.shutdown()
    return when, ended


def found():
    """{"dies": {case: what that worker says}, "ended": None, "failed": {"hook" or "class": [time, error]}}."""
    told, ended = ask()
    return {"dies": told, "ended": ended, "failed": {kind: fail(kind) for kind in ("hook", "class")}}
