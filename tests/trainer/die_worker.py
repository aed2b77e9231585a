"""Start Ray with workers that report their die, when they knew it, and their network interfaces.

No device is needed: Ray sets ASCEND_RT_VISIBLE_DEVICES for actors that ask for its resource NPU. `verl` is an empty
module on PYTHONPATH, because only the time of its import matters here.
"""

import os
import sys
import time
import types

import ray
import verl  # noqa: F401  (as verl's worker module does: loading the class imports it)

from verl_patches.errors import ConfigError
from verl_patches.platform import npu
from verl_patches.trainer import ray_start

AT_IMPORT = os.environ.get(npu.VISIBLE_DEVICES)
VERLS = {"RANK": "0", "WG_PREFIX": "abc"}  # the variables of a worker of verl's
INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class Asked:
    """Stand in for an actor of verl's worker group."""

    def __new__(cls):  # as in verl's Worker: Ray then treats a class that fails to load differently
        return super().__new__(cls)

    def __init__(self):
        if os.environ.get("FAIL") == "init":
            raise ConfigError("row a.b: has drifted")

    def report(self, visible=1):
        """Return the facts that this process has about its die; the runtime sees `visible` devices."""
        try:
            refused = npu.check_visible_die(visible)
        except ConfigError as error:
            refused = str(error)
        report = {name: os.environ.get(name) for name in INTERFACES}
        report |= {"at hook": os.environ["AT_HOOK"], "at import": AT_IMPORT, "now": os.environ.get(npu.VISIBLE_DEVICES)}
        report |= {"prepared": os.environ.get("PREPARED"), "refused": refused}
        return {**report, "head": ray.get_runtime_context().gcs_address}


class NodeAgent:
    """Stand in for the watch's agent on a node where no process of the run can start."""

    def __init__(self):
        raise ConfigError("row a.b: has drifted")


def hook():
    """Return the user's set-up hook, pickled by value: importing this module would import verl too early."""

    def note():
        """Fail if FAIL is "hook"; if it is "class", make the class fail when it is loaded."""
        from verl_patches.patching.hooks import after_import

        def prepare(engine):
            os.environ["PREPARED"] = f"{engine['layers']} {os.environ.get(npu.VISIBLE_DEVICES)}"

        def fail(_=None):
            raise ConfigError("row a.b: has drifted")

        engine_start = types.ModuleType("verl_patches.model.mindspeed.start")  # it needs MindSpeed
        engine_start.prepare = prepare
        sys.modules[engine_start.__name__] = engine_start
        os.environ["AT_HOOK"] = repr(os.environ.get(npu.VISIBLE_DEVICES))
        if os.environ.get("FAIL") == "hook":
            fail()
        if os.environ.get("FAIL") == "class":
            after_import(__name__, fail)

    return note


def start():
    """Start Ray with two pretended dies; return a function that makes an actor of Asked, and a task that sleeps."""
    options = {"num_cpus": 4, "resources": {"NPU": 2}, "include_dashboard": False, "log_to_driver": False}
    switches = {"VERL_PATCHES": os.environ["VERL_PATCHES"]}
    network = {"nodes": 1, "interface": None}
    ray_start.start_ray(switches, {"layers": 4}, network, **options, runtime_env={ray_start.HOOK: hook()})
    asked = ray.remote(num_cpus=0)(Asked)

    def worker(npus=1, **env):
        resources = {"NPU": npus} if npus else {}
        return asked.options(resources=resources, runtime_env={"env_vars": {**VERLS, **env}}).remote()

    return worker, ray.remote(num_cpus=1)(lambda seconds: time.sleep(seconds))


def dies():
    """Return {case: that worker's report of its die}, and the results of waits after actors were ended on purpose."""
    worker, wait = start()
    first, second = worker(), worker()
    reports = {"first": first.report.remote(), "second": second.report.remote()}
    reports = {name: ray.get(report) for name, report in reports.items()}
    reports["runtime came first"] = ray.get(first.report.remote(visible=16))
    ray.kill(first)
    ray.kill(second)
    free = worker(RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES="1")
    reports["not set"] = ray.get(free.report.remote())
    agent = ray.remote(num_cpus=0)(NodeAgent).remote()
    ray.wait([agent.__ray_ready__.remote()])  # returns once the actor has failed
    ended = [way(wait.remote(3)) for way in (ray_start.wait_for_result, verls_wait)]
    ray.shutdown()
    return reports, ended


def verls_wait(task):
    """Wait as verl itself does."""
    return ray_start.run_unless_start_fails(lambda: ray.get(task))


def failure(kind):
    """Return the error that ends a wait of an hour if a worker fails in its hook, or as its class is loaded or made."""
    worker, wait = start()
    failing, way = worker(npus=0, FAIL=kind), verls_wait if kind == "init" else ray_start.wait_for_result
    try:
        ended = way(wait.remote(3600))
    except RuntimeError as error:
        ended = str(error)
    del failing
    ray.shutdown()
    return ended


def answers():
    """Return {"dies": {case: report of that worker}, "ended": [None, None], "failed": {kind: error}}."""
    reports, ended = dies()
    return {"dies": reports, "ended": ended, "failed": {kind: failure(kind) for kind in ("hook", "class", "init")}}
