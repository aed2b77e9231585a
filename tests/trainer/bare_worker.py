"""Define a worker for the test of proofs, and a controller that collects the proofs of two of them."""

import importlib
import os
import sys
from types import SimpleNamespace

import ray
import torch
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls


class Bare(Worker):
    """Stand in for ActorRolloutRefWorker; with the prelude, patch update.recipe_worker adds its method."""

    run = SimpleNamespace(samples=True)  # the facts of a run that its proof reads

    def __init__(self):
        super().__init__()
        if "verl_patches.prelude_patch" in sys.modules:
            add_proof()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self):
        """Join the process group, as init_model does."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)


def add_proof():
    from verl_patches.worker.recipe_worker import RecipeWorker

    Bare.prove_patches = RecipeWorker.prove_patches


def prelude_on_rank_one():
    """Import the prelude on rank 1 only; this is the worker set-up hook."""
    if os.environ.get("RANK") == "1":
        importlib.import_module("verl_patches.prelude_patch")


def proofs():
    """Return (digest of the controller, [{rank, where, digest}], refusal or None); only worker 1 ran the prelude."""
    from verl_patches import prelude_patch
    from verl_patches.patching import handshake
    from verl_patches.patching.engine import PatchError

    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 128 << 20}
    ray.init(num_cpus=5, **options, runtime_env={"worker_process_setup_hook": prelude_on_rank_one})
    add_proof()
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    both = create_colocated_worker_cls({"actor_rollout": RayClassWithInitArgs(ray.remote(Bare))})
    group = RayWorkerGroup(pool, both).spawn({"actor_rollout"})["actor_rollout"]
    group.start()
    found, refusal = handshake.gather_proofs(group), None
    try:
        handshake.require_proofs(found)
    except PatchError as error:
        refusal = str(error)
    return prelude_patch.engine.digest(), found, refusal
