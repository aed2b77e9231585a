"""The driver of a run: `python -m verl_patches.main_grpo --config-name NAME [hydra overrides]`.

Started by cluster/launch.py with the run's environment. It starts (or joins) Ray with the prelude in every worker and
lets one of them run verl's own TaskRunner: that process is the controller. The driver itself imports neither torch nor
verl, so it costs a second and little memory.
"""

from verl_patches import prelude_patch  # noqa: F401  (before anything of upstream)

# isort: split
import argparse
import contextlib
import os
import sys
import threading

from verl_patches.cluster.compose import compose
from verl_patches.trainer import ray_start

ENDED = "the controller has ended"
_FORWARDED_S = 5


def main(arguments: list[str]) -> int:
    """Run one training; 0 when it ended well. Errors leave as exceptions, for the log."""
    parser = argparse.ArgumentParser(prog="verl_patches.main_grpo")
    parser.add_argument("--config-name", required=True)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    config = compose(given.config_name, given.overrides)
    with contextlib.redirect_stdout(_Watched(sys.stdout, ENDED)) as output:
        ray_start.start(**ray_options(config), engine=engine_section(config))
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            node = ray.get_runtime_context().get_node_id()  # its record is ours
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            controller = ray.remote(num_cpus=1)(Controller).options(scheduling_strategy=here).remote()
            ray_start.result_of(controller.run.remote(config))
            output.seen.wait(_FORWARDED_S)
            if config.ray_init.get("timeline_json_file"):
                ray.timeline(filename=config.ray_init.timeline_json_file)
        except ray.exceptions.RayTaskError:
            output.seen.wait(_FORWARDED_S)
            raise
        finally:
            ray.shutdown()
    return 0


class _Watched:
    """A text stream that notes when a text was written to it: Ray forwards output late, and shutdown drops the rest."""

    def __init__(self, stream, text: str):
        self._stream, self._text, self.seen = stream, text, threading.Event()

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        if self._text in text:
            self.seen.set()
        return written

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


class Controller:
    """An actor, as Ray keeps the reason why an actor's process could not start, and for a task only that it died."""

    def run(self, config) -> None:
        """verl's run."""
        run_task_runner(config)


def run_task_runner(config) -> None:
    """In a Ray worker: what verl's run_ppo lets its TaskRunner actor do, in this process instead of another one."""
    try:
        from verl.trainer.main_ppo import TaskRunner

        TaskRunner.__ray_metadata__.modified_class().run(config)
    finally:
        sys.stdout.write(f"{ENDED}\n")  # its last line: when this one has been forwarded, all others have been
        sys.stdout.flush()


def engine_section(config) -> dict | None:
    """What line a3's workers prepare their engine from before they import Megatron; other lines need nothing."""
    from omegaconf import OmegaConf

    from verl_patches.cluster.checkouts import LINE

    return OmegaConf.to_container(config.actor_rollout_ref) if config.recipe.line == LINE else None


def ray_options(config) -> dict:
    """Options of ray.init for this config: join `recipe.ray_address`, or start a local Ray of the run's own."""
    from verl_patches.cluster.environment import worker_environment

    recipe = config.recipe
    network = {"nodes": config.trainer.nnodes, "interface": recipe.hccl.interface} if recipe.platform == "npu" else None
    options = {"environment": worker_environment(config), "network": network, "log_to_driver": True, "runtime_env": {
        ray_start.HOOK: recipe.worker_process_setup_hook}}
    if recipe.ray_address is not None:
        return {**options, "address": recipe.ray_address}
    workers = config.trainer.n_gpus_per_node
    devices = {"resources": {"NPU": workers}} if config.trainer.device == "npu" else {"num_gpus": workers}
    if recipe.platform == "cpu":
        devices["object_store_memory"] = 256 << 20  # bytes; a tiny model's batches
    return {**options, **devices, "num_cpus": config.ray_init.num_cpus or workers + 4, "include_dashboard": False,
            "_temp_dir": os.environ.get("RAY_TMPDIR")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
