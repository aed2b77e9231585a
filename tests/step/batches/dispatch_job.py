"""Call verl's real RayWorkerGroup with patches dispatch.* and without; four workers (TP2 x DP2) in two actors."""

import hashlib
import time

import numpy as np
import ray
import torch
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register

from tests.ranks import HANG_S
from tests.step.batches.logical_group import make_group, serialised_sizes
from verl_patches import prelude_patch
from verl_patches.trainer import dispatch, ray_start
from verl_patches.trainer.dispatch import take_calls

LARGE = 1 << 18  # int64 values: 2 MiB


class Echo:
    """Return digests of the arguments, or the argument itself, from a worker."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def say(self, *args, **kwargs):
        """Return [digest of each value, whether its arrays can be written to]."""
        return [[digest(value), writable(value)] for value in (*args, *kwargs.values())]

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, data):
        self.say(data)  # a dispatched method inside a call
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, data):
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, data):
        raise ValueError(f"no {type(data).__name__}")


def digest(value):
    if isinstance(value, DataProto):
        value = [value.batch["x"].numpy(), value.non_tensor_batch["n"], value.meta_info]
    if isinstance(value, list):
        return [digest(part) for part in value]
    return hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else repr(value)


def writable(value):
    if isinstance(value, DataProto):
        value.batch["x"] += 1  # the worker may write to it
        return [True, value.non_tensor_batch["n"].flags.writeable]
    return value.flags.writeable if isinstance(value, np.ndarray) else None


def batch(seed):
    """Return 8 samples of 4 MiB."""
    x = torch.arange(2 * LARGE).reshape(8, -1) + seed
    return DataProto.from_dict({"x": x}, {"n": np.arange(8) + seed}, {"step": seed})


def cases(group):
    """Return {case: () -> answers}."""
    array, (first, second) = np.arange(LARGE), batch(1).chunk(2)
    each = [np.arange(LARGE) + n for n in range(4)]
    return {
        "shared by a replica": lambda: group.execute_all_sync("say", [first, first, second, second]),
        "one a worker": lambda: group.execute_all_sync("say", each, name=[str(n) for n in range(4)]),
        "one for all": lambda: group.execute_all_sync("say", array, [1, 2], name="x", same=array),
        "small": lambda: group.execute_all_sync("say", [1, 2, 3, 4], [np.arange(9)] * 4),
        "nothing": lambda: group.execute_all_sync("say"),
        "verl's Megatron dispatch": lambda: digest(group.compute(batch(2))),
        "verl's dispatch to all": lambda: digest(group.generate(batch(3))),
    }


def facts(group):
    """Return {case: facts}, and the form in which a worker's error arrives.

    `large`: objects above 1 MB that this process serialised; `row`: the patch's own counts.
    """
    found = {}
    take_calls()
    for name, call in cases(group).items():
        with serialised_sizes() as sizes:
            answers = call()
        large = sum(size > 1e6 for size in sizes)
        found[name] = {"answers": answers, "large": large, "bytes": sum(sizes), "row": take_calls()}
    try:
        group.fail(np.arange(LARGE))
    except ValueError as error:
        found["error"] = [type(error).__name__, "no ndarray" in str(error)]
    return found


def on_and_off():
    """Return {"on"|"off": {case: facts}}, and what the object store is said to hold."""
    ray_start.start_ray({}, num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    group, _ = make_group(Echo, 2, 4)
    group.lay_out(tp=2, dp=2, pp=1)
    on = facts(group)
    prelude_patch.engine.revert()
    return {"on": on, "off": facts(group), "kept_bytes": kept_object_bytes()}


def kept_object_bytes():
    """Return the bytes of one kept object, and what the stores are said to hold once they report it, or at the end."""
    end = time.monotonic() + HANG_S
    kept = ray.put(np.zeros(50 << 20, np.uint8))
    while (held := dispatch.object_store_usage()["object_store_bytes"]) < 50 << 20 and time.monotonic() < end:
        time.sleep(0.1)
    return ray.get(kept).nbytes, held
