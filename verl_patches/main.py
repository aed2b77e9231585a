"""The driver of a run: `python -m verl_patches.main RUN/config.yaml`, the composed configuration of the run.

launch/launcher.py has checked and written that file, and starts the driver with the run's environment. It starts (or
joins) Ray with the prelude in every worker and lets one of them run verl's own TaskRunner: that process is the
controller. The driver itself imports neither torch nor verl, so it costs a second and little memory.
"""

from verl_patches import prelude_patch  # noqa: F401  (before anything of upstream)

# isort: split
import contextlib
import sys
import threading

from omegaconf import OmegaConf

from verl_patches.config.environment import run_dir
from verl_patches.layout.parallel import world_size
from verl_patches.layout.phases import START
from verl_patches.patching import engine
from verl_patches.trainer import ray_start
from verl_patches.trainer.record import Progress
from verl_patches.watch import heartbeat
from verl_patches.watch.watcher import Watcher

ENDED = "the controller has ended"
_FORWARDED_S = 5


def main(arguments: list[str]) -> int:
    """Run one training from its only argument, the file; 0 when it ended well. Errors are raised, for the log."""
    (file,) = arguments
    config = OmegaConf.load(file)
    stage = Progress(run_dir(config))
    stage.say("~ starting Ray" if config.recipe.ray_address is None else f"~ joining Ray, {config.recipe.ray_address}")
    with contextlib.redirect_stdout(_Watched(sys.stdout, ENDED)) as output:
        # here, as the controller imports this module too
        from verl_patches.launch.ray_cluster import leave_out, ray_options

        ray_start.start(**ray_options(config))
        stage.say("~ Ray runs, starting the controller")
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        watcher, failed = None, True
        try:
            leave_out(config)
            watch = config.recipe.watch
            if watch.action != "off":
                from verl_patches.planning.step_plan import bounds_of

                bounds = bounds_of(config, engine.current().wanted)
                sys.stdout.write(f"watch: bounds of a phase: {bounds}\n")
                stops, say = watch.action == "stop", lambda text: stage.say(f"~ {text}")
                watcher = Watcher(run_dir(config), bounds, world_size(config), stops, say)
            node = ray.get_runtime_context().get_node_id()  # the controller writes the run's record on this node
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            controller = ray.remote(num_cpus=1)(Controller).options(scheduling_strategy=here).remote()
            ray_start.result_of(controller.run.remote(config), watcher.check if watcher else lambda: None)
            failed = False
            output.seen.wait(_FORWARDED_S)
            if config.ray_init.get("timeline_json_file"):
                ray.timeline(filename=config.ray_init.timeline_json_file)
        except ray.exceptions.RayError as error:
            output.seen.wait(_FORWARDED_S)
            if watcher is not None:
                watcher.explain(error)
            raise
        finally:
            if watcher is not None:
                watcher.close(failed)
            ray.shutdown()
    return 0


class _Watched:
    """A text stream with an event for when a text has come: Ray forwards output late, and shutdown drops the rest."""

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
    """The controller's actor. As a plain task Ray would not keep the reason why its process could not start."""

    def run(self, config) -> None:
        """Run verl's TaskRunner to its end."""
        if config.recipe.watch.action != "off":
            heartbeat.start_in_ray("controller")
            heartbeat.here().controller_is_at(0, START)
        run_task_runner(config)


def run_task_runner(config) -> None:
    """In a Ray worker: run verl's TaskRunner in this process; verl's run_ppo gives it an actor of its own."""
    try:
        from verl.trainer.main_ppo import TaskRunner

        TaskRunner.__ray_metadata__.modified_class().run(config)
    finally:
        sys.stdout.write(f"{ENDED}\n")  # the last line: once it has been forwarded, all others have been
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
