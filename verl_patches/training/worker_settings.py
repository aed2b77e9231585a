"""What a run without our launcher sends to its workers: VERL_PATCHES, and what line a3's engine is prepared from.

With the launcher both come by Ray's runtime_env and set-up hook (ray_start.py). The prelude imports this file.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verl_patches.patching import engine
from verl_patches.patching.switches import VARIABLE


def send_switches(original: Callable) -> Callable:
    """Row provider for ray.init: the job's processes on every node get this process's VERL_PATCHES, unless it is given.

    Variables of the driver's shell do not reach nodes where `ray start` ran without them.
    """

    @functools.wraps(original)
    def init(*args: Any, **options: Any) -> Any:
        given = options.get("runtime_env") or getattr(options.get("job_config"), "runtime_env", None) or {}
        variables = given.get("env_vars") or {}
        if VARIABLE not in variables and VARIABLE not in _submitted_variables():  # Ray refuses one that stands twice
            sent = {**variables, VARIABLE: engine.current().switches.text()}
            options["runtime_env"] = {**given, "env_vars": sent}
        return original(*args, **options)

    return init


def _submitted_variables() -> Mapping[str, str]:
    """The variables that `ray job submit` gives to the job that this driver belongs to."""
    import json

    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON") or "{}")
    return (job.get("runtime_env") or {}).get("env_vars") or {}


def send_engine_section(section: Mapping[str, Any]) -> None:
    """In the controller: leave verl's actor_rollout_ref section for `prepare_from_controller` in the job's workers."""
    import json

    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_engine_key(), json.dumps(section))


def prepare_from_controller(_: Any) -> None:
    """Import hook of verl, line a3: in a training worker prepare the engine from that section, before Megatron.

    Does nothing in other processes, and where our launcher's set-up hook prepares it.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    from ray.experimental.internal_kv import _internal_kv_get

    from verl_patches.training.ray_start import VERLS_WORKERS

    section = _internal_kv_get(_engine_key()) if os.environ.keys() >= VERLS_WORKERS else None
    if section is not None:
        import json

        from verl_patches.training.engine_start import prepare

        prepare(json.loads(section))


def _engine_key() -> str:
    import ray

    return f"verl_patches/engine/{ray.get_runtime_context().get_job_id()}"
