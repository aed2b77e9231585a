"""Ray for one run: every worker process runs the prelude before anything else, then the user's own set-up hook.

A run without our launcher (cluster/import_alone.py) has no set-up hook of ours: `tell_workers` and `tell_engine` bring
its workers VERL_PATCHES and what their engine must be prepared from.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verl_patches.patching.switches import VARIABLE

HOOK = "worker_process_setup_hook"
# verl gives both to the actors of its worker groups and to nothing else (verl/single_controller/ray/base.py:326);
# RANK alone may come from a scheduler that started the driver
_VERLS_WORKERS = {"RANK", "WG_PREFIX"}


def prelude_then(user_hook: str | Callable | None, engine: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """What each Ray worker process runs first; a user's hook is a callable or "package.module.function".

    `engine`: verl's actor_rollout_ref section, for a line whose engine must be prepared before Megatron is imported.
    """

    def prelude_hook() -> None:
        importlib.import_module("verl_patches.prelude_patch")
        if engine is not None and os.environ.keys() >= _VERLS_WORKERS:
            importlib.import_module("verl_patches.training.engine_start").prepare(engine)
        hook = user_hook
        if isinstance(hook, str):
            module, _, name = hook.rpartition(".")
            hook = getattr(importlib.import_module(module), name)
        if hook is not None:
            hook()

    return prelude_hook  # Ray wants a function with a name, not a partial


def runtime_env(
    environment: dict[str, str], given: dict[str, Any] | None = None, engine: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Ray's runtime_env: `given` by the user, our variables over it, and the set-up hooks chained."""
    env = dict(given or {})
    env["env_vars"] = {**env.get("env_vars", {}), **environment}
    env[HOOK] = prelude_then(env.get(HOOK), engine)
    return env


def start(environment: dict[str, str], engine: Mapping[str, Any] | None = None, **options: Any) -> None:
    """ray.init with the chained hooks; options are ray.init's own."""
    import ray

    ray.init(runtime_env=runtime_env(environment, options.pop("runtime_env", None), engine), **options)


def tell_workers(original: Callable) -> Callable:
    """Row provider for ray.init: the job's processes on every node get this process's VERL_PATCHES, unless it is given.

    Variables of the driver's shell do not reach nodes where `ray start` ran without them.
    """

    @functools.wraps(original)
    def init(*args: Any, **options: Any) -> Any:
        from verl_patches.patching import engine

        given = options.get("runtime_env") or getattr(options.get("job_config"), "runtime_env", None) or {}
        variables = given.get("env_vars") or {}
        if VARIABLE not in variables and VARIABLE not in _submitted_variables():  # Ray refuses one that stands twice
            told = {**variables, VARIABLE: engine.current().switches.text()}
            options["runtime_env"] = {**given, "env_vars": told}
        return original(*args, **options)

    return init


def _submitted_variables() -> Mapping[str, str]:
    """The variables that `ray job submit` gives to the job that this driver belongs to."""
    import json

    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON") or "{}")
    return (job.get("runtime_env") or {}).get("env_vars") or {}


def tell_engine(section: Mapping[str, Any]) -> None:
    """In the controller: leave verl's actor_rollout_ref section for `prepare_from_controller` in the job's workers."""
    import json

    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_engine_key(), json.dumps(section))


def prepare_from_controller(_: Any) -> None:
    """Import hook of verl, line a3: in a training worker prepare the engine as `tell_engine` says, before Megatron.

    Does nothing in other processes, and where our launcher's set-up hook prepares it.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or not os.environ.keys() >= _VERLS_WORKERS:
        return
    import json

    from ray.experimental.internal_kv import _internal_kv_get

    section = _internal_kv_get(_engine_key())
    if section is not None:
        importlib.import_module("verl_patches.training.engine_start").prepare(json.loads(section))


def _engine_key() -> str:
    import ray

    return f"verl_patches/engine/{ray.get_runtime_context().get_job_id()}"
