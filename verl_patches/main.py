"""Run the driver of a run: `python -m verl_patches.main FOLDER`, where FOLDER has a start's configuration and facts.

launch/launcher.py checks and writes these files, and starts the driver with the run's environment. The driver starts
(or joins) Ray with the prelude in every worker and lets one of them run verl's own TaskRunner: that process is the
controller. The driver itself imports neither torch nor verl, so it costs a second and little memory.
"""

from verl_patches import prelude_patch  # noqa: F401  (must precede upstream imports)

# isort: split
import contextlib
import re
import sys
import threading
import traceback
from pathlib import Path

from omegaconf import OmegaConf

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.heartbeat import heartbeat
from verl_patches.launch.supervise.stall import WAIT_SHARE, Bounds
from verl_patches.launch.supervise.watcher import Watcher
from verl_patches.layout.phases import START
from verl_patches.run import hccl
from verl_patches.run.environment import CONFIG_FILE, FACTS_FILE
from verl_patches.spec import read_run, run_from_config
from verl_patches.trainer import ray_start
from verl_patches.trainer.record import Progress

ENDED_LINE = "the controller has ended"
_FORWARD_LIMIT_S = 5  # wait for Ray to forward the controller's last line


def main(arguments: list[str]) -> int:
    """Run one training from its only argument, the folder, and return 0; errors are raised, for the log."""
    folder = Path(*arguments)
    run = read_run((folder / FACTS_FILE).read_text(), OmegaConf.load(folder / CONFIG_FILE))
    stage, address, watch = Progress(folder), run.recipe.ray_address, run.recipe.watch
    stage.say("~ starting Ray" if address is None else f"~ joining the Ray cluster at {address}")
    with contextlib.redirect_stdout(_WatchedStream(sys.stdout, ENDED_LINE)) as output:
        # imported here, because the controller imports this module too
        from verl_patches.launch.ray_cluster import ray_options, reserve_left_out_nodes

        ray_start.start_ray(**ray_options(run))
        stage.say("~ Ray is up, starting the controller")
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        watcher, failed = None, True
        try:
            reserve_left_out_nodes(run)
            if watch.action != "off":
                collective_s = WAIT_SHARE * hccl.exec_timeout_s(run)
                load_s = run.recipe.timeouts.load_s
                bounds = Bounds(watch.first_s, watch.least_s, watch.factor, load_s, collective_s)
                sys.stdout.write(f"watch: time limits of a phase: {bounds}\n")
                watcher = Watcher(folder, bounds, run.world_size, lambda text: stage.say(f"~ {text}"))
            node = ray.get_runtime_context().get_node_id()  # the controller writes the run's record on this node
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            controller = ray.remote(num_cpus=1)(Controller).options(scheduling_strategy=here).remote()
            ray_start.wait_for_result(controller.run.remote(run.verl), watcher.check if watcher else lambda: None)
            failed = False
            output.seen.wait(_FORWARD_LIMIT_S)
            if timeline := run.verl.ray_init.get("timeline_json_file"):
                ray.timeline(filename=timeline)
        except ray.exceptions.RayError as error:
            output.seen.wait(_FORWARD_LIMIT_S)
            if watcher is not None:
                watcher.explain_error(error)
            raise
        finally:
            if watcher is not None:
                watcher.close(failed)
            ray.shutdown()
    return 0


class _WatchedStream:
    """Set the event `seen` once `text` was written to a stream; Ray forwards output late, and shutdown drops it."""

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
    """Run the controller as a Ray actor; for a plain task Ray drops the reason why its process could not start."""

    def run(self, config) -> None:
        """Run verl's TaskRunner to its end."""
        OmegaConf.set_readonly(config, False)  # verl writes the number of steps
        if run_from_config(config).recipe.watch.action != "off":
            heartbeat.start_in_ray("controller")
            heartbeat.current_heartbeat().set_controller_step(0, START)
        run_task_runner(config)


def run_task_runner(config) -> None:
    """Run verl's TaskRunner in this process, a Ray worker; verl's run_ppo would give it an actor of its own."""
    try:
        from verl.trainer.main_ppo import TaskRunner

        TaskRunner.__ray_metadata__.modified_class().run(config)
    finally:
        sys.stdout.write(f"{ENDED_LINE}\n")  # the last line: once Ray has forwarded it, all others have been
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:
        text = traceback.format_exc()
        if isinstance(error, ConfigError | RecipeError):  # Ray's own errors hold whole tracebacks of processes
            message = str(getattr(error, "cause", error))  # Ray brings the controller's error as its cause
            # so that the launcher knows the lines of a message in the log
            text = text.replace(message, re.sub(r"\n(?!  )", "\n  ", message))
        sys.stderr.write(text)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
