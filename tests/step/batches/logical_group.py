"""Build verl's RayWorkerGroup over logical workers, several in one actor, with the ranks of a Megatron layout."""

from contextlib import contextmanager
from unittest import mock

import ray
from verl.single_controller.base.megatron.worker import DistGlobalInfo, DistRankInfo
from verl.single_controller.base.megatron.worker_group import MegatronWorkerGroup
from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup


class LogicalGroup(RayWorkerGroup, MegatronWorkerGroup):
    """Stand in for NVMegatronRayWorkerGroup, which asks each actor for one rank; here an actor has several workers."""

    def lay_out(self, tp, dp, pp):
        """Set the ranks in Megatron's order: tp within dp within pp."""
        ranks = [(t, d, p) for p in range(pp) for d in range(dp) for t in range(tp)]
        self._megatron_rank_info = [DistRankInfo(tp_rank=t, dp_rank=d, pp_rank=p, cp_rank=0) for t, d, p in ranks]
        self._megatron_global_info = DistGlobalInfo(tp_size=tp, dp_size=dp, pp_size=pp, cp_size=1)
        return self


def make_group(cls, actors, workers):
    """Return (group, actors) of `workers` logical workers of class `cls`, the n-th in actor n % actors."""
    made = [ray.remote(num_cpus=0)(cls).remote() for _ in range(actors)]
    group = LogicalGroup(
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(cls)),
        worker_names=[str(n) for n in range(workers)],
        worker_handles=[made[n % actors] for n in range(workers)],
    )
    return group, made


@contextmanager
def serialised_sizes():
    """Yield a list of the bytes of each object that Ray serialises in this process inside the context."""
    from ray._private.serialization import SerializationContext

    sizes, original = [], SerializationContext.serialize

    def serialize(context, value):
        serialised = original(context, value)
        sizes.append(serialised.total_bytes)
        return serialised

    with mock.patch.object(SerializationContext, "serialize", serialize):
        yield sizes
