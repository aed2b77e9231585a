"""Run one instance of a run's rollout on the job's Ray: an engine on each of its ranks, and prompts spread over them.

verl's own worker group places the workers like the trainer's, and each reads its weights from the folder, which
every node needs under the same path. Ranks of a data-parallel group share experts, so they make their steps together;
a rank without requests takes part with a dummy batch, as in a run (vLLM's V1, row platform.vllm_dp_lockstep).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.launch.launcher import short_temp_dir
from verl_patches.launch.ray_cluster import ray_options, require_nodes, reserve_left_out_nodes
from verl_patches.run.environment import RAY_FOLDER
from verl_patches.run.ray_nodes import error_line
from verl_patches.spec import RunSpec
from verl_patches.tools.inference.engine import Engine, Request
from verl_patches.trainer import ray_start

log = logging.getLogger(__name__)
WAIT_NOTICE_S = 20  # how long it waits for dies before it says so


class EngineWorker(Worker):
    """Run the engine of one rank."""

    def build(self, folder: Path, run: RunSpec, length: int) -> None:
        """Build the engine; collective over all ranks of the instance."""
        dist.init_process_group("gloo")
        layout = run.rollout
        parallel = {"tensor_parallel_size": layout.tp, "data_parallel_size": layout.dp}
        parallel["enable_expert_parallel"] = run.recipe.rollout.enable_expert_parallel
        self.yields_outputs = dist.get_rank() % layout.tp == 0
        self.engine = Engine(folder, run, length, parallel)

    def outputs(self, requests: Sequence[Request]) -> Iterator[Any]:
        """Yield Engine.outputs of a replica's requests on its first rank only, as the others make the same outputs."""
        for output in self.engine.outputs(requests):
            if self.yields_outputs:
                yield output


class RankedEngine(Engine):
    """Present the engines of all ranks as one engine."""

    def __init__(self, workers: Sequence[Any], tp: int):
        self._workers, self._tp = workers, tp

    def outputs(self, requests: Sequence[Request]) -> Iterator[Any]:
        """Yield vLLM's outputs as they come; replica d of R has requests d, d + R, ..."""
        replicas, streams = len(self._workers) // self._tp, []
        for rank, worker in enumerate(self._workers):
            own = requests[rank // self._tp :: replicas]
            streams.append(worker.outputs.options(num_returns="streaming").remote(own))
        while streams:
            (ready,), streams = ray.wait(streams, num_returns=1)
            output = next(ready, None)
            if output is not None:
                streams.append(ready)
                with _rank_errors():
                    made = ray.get(output)
                yield made


@contextmanager
def start_ranked_engine(folder: Path, run: RunSpec, length: int) -> Iterator[RankedEngine]:
    """Yield the engines of a run, whose ranks are those of one instance, as long as the block lasts.

    This joins recipe.ray_address, or starts its own Ray on this machine. Raise ConfigError where nodes are missing;
    where other jobs have their dies, it waits and says so.
    """
    require_nodes(run)
    options = {**ray_options(run), "engine": None, "log_to_driver": False}  # no Megatron here
    trainer = run.verl.trainer
    with ExitStack() as stack:
        if "_temp_dir" in options:
            options["_temp_dir"] = str(stack.enter_context(short_temp_dir()) / RAY_FOLDER)
        sigterm_handler = signal.getsignal(signal.SIGTERM)
        ray_start.start_ray(**options)
        signal.signal(signal.SIGTERM, sigterm_handler)  # replaces Ray's own handler
        stack.callback(ray.shutdown)
        reserve_left_out_nodes(run)
        pool = RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=True, max_colocate_count=1)
        kind = RayClassWithInitArgs(ray.remote(EngineWorker))
        notice = threading.Timer(WAIT_NOTICE_S, _warn_of_wait, [pool])
        notice.start()
        stack.callback(notice.cancel)
        with _rank_errors():
            group = ray_start.run_unless_start_fails(lambda: RayWorkerGroup(pool, kind, device_name=trainer.device))
            ray.get([worker.build.remote(folder.absolute(), run, length) for worker in group._workers])
        yield RankedEngine(group._workers, run.rollout.tp)


def _warn_of_wait(pool: RayResourcePool) -> None:
    if pool.pgs is None:  # no placement group is reserved yet
        log.warning("waiting for nodes with %s free devices: other jobs of this Ray cluster hold them", pool.store)


@contextmanager
def _rank_errors() -> Iterator[None]:
    """Raise an error of a rank unchanged if it is one of ours, else as a RecipeError of one sentence."""
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError) as error:  # RuntimeError: a rank could not start
        cause = getattr(error, "cause", None)
        if isinstance(cause, (ConfigError, RecipeError)):
            raise cause from error
        raise RecipeError(f"a rank of the rollout failed: {repr(cause) if cause else error_line(error)}") from error
