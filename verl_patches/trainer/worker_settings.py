"""Send settings to the workers of a run: VERL_PATCHES, network interface, line a3's engine.

With the launcher VERL_PATCHES comes through Ray's runtime_env, whose set-up hook is `chain_setup_hooks`.

Order in a Ray worker (2.42.1): default_worker.py runs the set-up hook before the worker knows its resources. Then the
first task or the actor's creation arrives, Ray sets ASCEND_RT_VISIBLE_DEVICES to the ids that it gave, and only then it
loads the actor's class, which imports verl. `import verl` queries the device runtime, which fixes the visible
devices (verl/utils/device.py calls torch.npu.is_available()). So the hook runs the prelude, which imports neither torch
nor verl, and MindSpeed, which imports torch_npu, is imported only at `import verl`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verl_patches.patching import engine
from verl_patches.patching.boot.before_import import PRELUDE
from verl_patches.patching.switches import PATCHES_VAR

# verl sets both only for the actors of its worker groups
# (verl.single_controller.ray.base.RayWorkerGroup._init_with_resource_pool); a scheduler that started the driver may
# have set RANK alone
VERL_WORKER_VARIABLES = {"RANK", "WG_PREFIX"}


def send_switches(original: Callable) -> Callable:
    """Wrap ray.init: give this process's VERL_PATCHES to the job's processes on every node, unless the user sets it.

    Variables of the driver's shell do not reach nodes where `ray start` ran without them.
    """

    @functools.wraps(original)
    def init(*args: Any, **options: Any) -> Any:
        given = options.get("runtime_env") or getattr(options.get("job_config"), "runtime_env", None) or {}
        variables = given.get("env_vars") or {}
        if PATCHES_VAR not in variables and PATCHES_VAR not in _submitted_variables():  # Ray refuses duplicates
            sent = {**variables, PATCHES_VAR: engine.current_engine().switches.text()}
            options["runtime_env"] = {**given, "env_vars": sent}
        return original(*args, **options)

    return init


def _submitted_variables() -> Mapping[str, str]:
    """Return the variables that `ray job submit` gives to the job of this driver."""
    import json  # the prelude imports this module in every process

    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON") or "{}")
    return (job.get("runtime_env") or {}).get("env_vars") or {}


def send_settings(engine: Mapping[str, Any] | None, network: Mapping[str, Any] | None) -> None:
    """Store in Ray, before workers start, what `prepare_as_sent` reads in them; None for what is unused.

    engine: verl's actor_rollout_ref section, for a line whose engine must be prepared before Megatron is imported.
    network: arguments of platform/npu/__init__.py's set_interface.
    """
    import json

    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_settings_key(), json.dumps({"engine": engine, "network": network}))


def prepare_as_sent(_: Any) -> None:
    """Set a training worker's network interface and prepare its engine, at verl's import and before Megatron's.

    It does nothing in other processes.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    import json

    from ray.experimental.internal_kv import _internal_kv_get

    sent = _internal_kv_get(_settings_key()) if os.environ.keys() >= VERL_WORKER_VARIABLES else None
    if sent is None:
        return
    settings = json.loads(sent)
    if settings["network"] is not None:
        from verl_patches.platform.npu import set_interface

        set_interface(**settings["network"])
    if settings["engine"] is not None:
        from verl_patches.model.mindspeed.start import prepare

        prepare(settings["engine"])


def chain_setup_hooks(user_hook: str | Callable | None) -> Callable[[], None]:
    """Return the function that each Ray worker process runs first; user_hook is callable or "package.module.function".

    The prelude lets `prepare_as_sent` run at the import of verl: the die is visible then, Megatron not imported.
    """

    def prelude_hook() -> None:
        importlib.import_module(PRELUDE)
        hook = user_hook
        if isinstance(hook, str):
            module, _, name = hook.rpartition(".")
            hook = getattr(importlib.import_module(module), name)
        if hook is not None:
            hook()

    return prelude_hook  # Ray requires a function with a name, not a partial


def _settings_key() -> str:
    import ray

    return f"verl_patches/settings/{ray.get_runtime_context().get_job_id()}"
