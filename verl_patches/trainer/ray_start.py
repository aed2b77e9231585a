"""Start Ray for one run with chained set-up hooks, and report actors that could not start or have died."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from verl_patches.heartbeat.node import NodeAgent
from verl_patches.trainer.worker_settings import chain_setup_hooks, send_settings

HOOK = "worker_process_setup_hook"
POLL_S = 1.0
DEAD_AFTER_S = 30.0  # Ray answers for a dead actor at once, on a busy node only after some seconds
# python/ray/_raylet.pyx appends it to the traceback of an error outside of an actor's own methods
_RAYS_LAST_LINE = "An unexpected internal error occurred while the worker was executing a task."


def runtime_env(environment: dict[str, str], given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return Ray's runtime_env: the user's `given`, overridden by our variables, with the set-up hooks chained."""
    env = dict(given or {})
    env["env_vars"] = {**env.get("env_vars", {}), **environment}
    env[HOOK] = chain_setup_hooks(env.get(HOOK))
    return env


def start_ray(
    environment: dict[str, str],
    engine: Mapping[str, Any] | None = None,
    network: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Call ray.init with the chained hooks, and send `engine` and `network` to the workers (worker_settings.py).

    `options` are those of ray.init.
    """
    import ray

    ray.init(runtime_env=runtime_env(environment, options.pop("runtime_env", None)), **options)
    send_settings(engine, network)


def wait_for_result(task: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
    """Return ray.get(task), or raise the error of an actor of this job that could not start.

    `meanwhile` is called about every POLL_S.

    verl would wait 300 s for the register centre of a worker group whose first worker is dead, and then report only
    that wait (verl.single_controller.ray.base.RayWorkerGroup._init_with_resource_pool). Raises RuntimeError with the
    worker's class, node, pid and traceback.
    """
    import ray

    while not ray.wait([task], timeout=POLL_S)[0]:
        _refuse_start_failure()
        meanwhile()
    return ray.get(task)


def run_unless_start_fails(body: Callable[[], Any]) -> Any:
    """Return the result of `body()`, or raise the error of an actor of this job that could not start.

    Use it in a process in which verl itself waits in Python (it polls the register centre once a second): `body` runs
    in a daemon thread. Raises RuntimeError like `wait_for_result`.
    """
    result: Future = Future()

    def run() -> None:
        try:
            result.set_result(body())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="verl_patches start", daemon=True).start()
    while not wait([result], timeout=POLL_S).done:
        _refuse_start_failure()
    return result.result()


def dead_actors(actors: Sequence[Any]) -> list[int]:
    """Return the indices of the actors whose processes have ended; one busy for DEAD_AFTER_S counts as alive."""
    import ray

    calls = [actor.__ray_ready__.remote() for actor in actors]
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=DEAD_AFTER_S) if calls else ([], [])
    dead = []
    for number, call in enumerate(calls):
        try:
            if call in answered:
                ray.get(call)
        except ray.exceptions.RayActorError:
            dead.append(number)
    return dead


def _refuse_start_failure() -> None:
    """Raise the error of this job's first actor that could not start, from Ray's actor table, if there is one."""
    import ray

    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    dead = ray._private.state.actors(job_id=job, actor_state_name="DEAD").values()
    for actor in sorted(dead, key=lambda actor: actor["EndTime"]):
        if actor["ActorClassName"] == NodeAgent.__name__:  # may fail on any node of the cluster; the watch reports it
            continue
        message = _start_death_message(actor["DeathCause"], actor["StartTime"])
        if message:
            place = f"{actor['ActorClassName']} (pid {actor['Pid']} on {actor['Address']['IPAddress']})"
            raise RuntimeError(f"{place}, an actor of this run, could not start:\n{message}")


def _start_death_message(cause: Any, started: int) -> str | None:
    """Return the message of a death in the set-up hook, at loading of the class or in __init__; None for others.

    cause: Ray's protobuf ActorDeathCause; started: ms since 1970, 0 if the actor was never ready. If a class of
    verl cannot be loaded, Ray does not report a failed creation: it makes a placeholder class, which fails in verl's
    Worker.__new__, and may mark the actor ready some milliseconds before it is dead.
    """
    from ray.exceptions import RayError

    kind = cause.WhichOneof("context")
    if kind == "creation_task_failure_context":
        return str(RayError.from_ray_exception(cause.creation_task_failure_context))
    if kind == "runtime_env_failed_context":
        return cause.runtime_env_failed_context.error_message
    if kind == "actor_died_error_context":
        died = cause.actor_died_error_context
        rays_own = died.error_message.endswith(_RAYS_LAST_LINE)
        if rays_own or not started and died.reason in (died.WORKER_DIED, died.NODE_DIED):
            return died.error_message.removesuffix(_RAYS_LAST_LINE).rstrip()
    return None
