"""Ray for one run: every worker process runs the prelude before anything else, then the user's own set-up hook."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

HOOK = "worker_process_setup_hook"
# verl gives both to the actors of its worker groups and to nothing else (verl/single_controller/ray/base.py:326);
# RANK alone may come from a scheduler that started the driver
_VERLS_WORKERS = {"RANK", "WG_PREFIX"}


def prelude_then(user_hook: str | Callable | None, engine: Mapping[str, Any] | None = None,
                 network: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """What each Ray worker process runs first; a user's hook is a callable or "package.module.function".

    `engine`: verl's actor_rollout_ref section, for a line whose engine must be prepared before Megatron is imported.
    `network`: arguments of platform/npu/network.py's set_interface, None where the interface is no question.
    """

    def prelude_hook() -> None:
        importlib.import_module("verl_patches.prelude_patch")
        if network is not None:
            importlib.import_module("verl_patches.platform.npu.network").set_interface(**network)
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
    environment: dict[str, str], given: dict[str, Any] | None = None, engine: Mapping[str, Any] | None = None,
    network: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Ray's runtime_env: `given` by the user, our variables over it, and the set-up hooks chained."""
    env = dict(given or {})
    env["env_vars"] = {**env.get("env_vars", {}), **environment}
    env[HOOK] = prelude_then(env.get(HOOK), engine, network)
    return env


def start(environment: dict[str, str], engine: Mapping[str, Any] | None = None,
          network: Mapping[str, Any] | None = None, **options: Any) -> None:
    """ray.init with the chained hooks; options are ray.init's own."""
    import ray

    ray.init(runtime_env=runtime_env(environment, options.pop("runtime_env", None), engine, network), **options)
