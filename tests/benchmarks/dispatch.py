"""What a step of the 256-die run serialises on the host, and how far apart its workers start. Run by hand:

    python tests/benchmarks/dispatch.py [--only bytes|skew] [--repeats 5]

Prints JSON: a list of figures, each with `value`, `bound` (null where it is only told) and `peer` (other ways in the
same run). Exits 1 where a bound is missed. verl's real RayWorkerGroup, Megatron dispatch and DataProto; the workers
answer with what verl's would (shapes and dtypes), without a model. 512 prompts x 16 responses, prompt <= 1024 and
response <= 3072 tokens, lengths lognormal, cv .55, mean response 983 (tests/tensor_cache/lengths.py). Ways of sending:

    copy a worker    each worker's batch serialised in its own call: verl 54c9b736; 0.4.0 for what is not Megatron's
    own dispatch     the imported verl's: 0.4.0 puts a Megatron batch into Ray's store once a DP rank. With
                     PYTHONPATH=<verl 54c9b736> it is that one's
    put once         row dispatch.put_once under a copy a worker
    ours             row dispatch.put_once, and recipe.tensor_cache.enabled (trainer/tensor_cache.py)

bytes   256 logical workers (TP4 x PP8 x DP8) in 16 Ray actors. All that Ray serialises for calls (`sent`) and for their
        answers, which the controller fetches from every worker (`back`), counted in its serialiser. `ours` and
        generation are at full scale; the other calls of other ways on 1/32 of the samples, times 32.
skew    8, 16 and 32 actors, one worker each, started by verl's calls of a step, the worst of its calls
        (trainer/dispatch.py), median of the repeats. Our messages are those of a whole step of 32 samples a worker; for
        other ways a worker's batch is 1/8 of what a DP rank has in the 256-die run. For 256 a straight line through
        the medians: a model, no measurement. Workers answer half a second after the last has been called, where real
        ones' devices work: else the answers of the first would take this machine's cores, which all actors share, from
        the last. Unpickling in turn on them is most of what is left of ours; no network lies between.
        Needs 16 GB: an actor has torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import verl
from tqdm import tqdm
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fit_step import EACH, PROMPTS, SAMPLES, VOCABULARY, WORLD, Step, balanced, lengths, prompts_of  # noqa: E402

from tests.tensor_cache.lengths import PROMPT, RESPONSE  # noqa: E402
from tests.tensor_cache.logical_group import LogicalGroup, Serialised, group_of  # noqa: E402
from verl_patches.tensor_cache.exchange import Ragged, model_inputs  # noqa: E402
from verl_patches.trainer.dispatch import put_before_calling  # noqa: E402
from verl_patches.trainer.tensor_cache import CachedStep, TensorCacheGroup  # noqa: E402
from verl_patches.trainer.worker_starts import noted, start_skew, take_starts  # noqa: E402

DP, PP, TP = 8, 8, 4
BYTES_SCALE, SKEW_SCALE = 32, 8
WORK_S = 0.5
BOUND_BYTES, BOUND_TIMES, BOUND_MODEL_S = 0.06e9, 50, 0.5
register = noted(register)


class Host:
    """An actor that stands for workers `ranks` of `dp` replicas; asked for them in turn, as the group does."""

    def stand_for(self, ranks, samples, heads, prompts, responses, held_in=None):
        """`heads`: {rank of a replica's head: its number}; lengths by sample, all of them; `held_in`: see Held."""
        self.ranks, self.heads, self.asked, self.held_in, self.calls = ranks, heads, {}, held_in, 0
        self.each = samples // max(len(heads), 1)
        self.lengths = prompts, responses
        self.counted = Serialised()
        self.counted.__enter__()

    def serialised(self):
        """Bytes of all answers since the last time."""
        total = sum(self.counted.sizes)
        self.counted.sizes.clear()
        return total

    def starts(self):
        """trainer/dispatch.py."""
        return take_starts()

    def _held(self, method):
        """Wait until answers may go; the rank that this call is for."""
        self.calls += 1
        while self.held_in and not Path(self.held_in, str(self.calls)).exists():
            time.sleep(0.05)
        self.asked[method] = self.asked.get(method, 0) + 1
        return self.ranks[(self.asked[method] - 1) % len(self.ranks)]

    def _ids(self, count, rank):
        first = rank * count
        return [
            Ragged(torch.randint(VOCABULARY, (sum(of),), dtype=torch.int32), of)
            for of in (tuple(each[first : first + count]) for each in self.lengths)
        ]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts):
        """vLLMRollout.generate_sequences."""
        count = len(prompts) * EACH
        tensors = model_inputs(*self._ids(count, self._held("generate")), PROMPT, RESPONSE, 0)
        return DataProto.from_dict({**tensors, "rollout_log_probs": torch.zeros(count, RESPONSE)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data):
        """ActorRolloutRefWorker, on every rank."""
        self._held("log_prob")
        shape = data.batch["responses"].shape
        return DataProto.from_dict({"old_log_probs": torch.zeros(shape), "entropys": torch.zeros(shape)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data):
        """Likewise."""
        self._held("ref")
        return DataProto.from_dict({"ref_log_prob": torch.zeros(data.batch["responses"].shape)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_actor(self, data):
        """Likewise."""
        self._held("update")
        return DataProto(meta_info={"metrics": {f"actor/{n}": [0.0] for n in range(10)}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self):
        """A call without arguments: what Ray itself takes."""
        self._held("nothing")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run_stage(self, stage, step, told=None):
        """worker/tensor_cache_stages.py, answers of every stage."""
        if stage == "generate":
            prompt, response = self._ids(len(self.lengths[0]) // WORLD, self._held(stage))
            return {
                "prompt_length": np.array(prompt.lengths),
                "response_length": np.array(response.lengths),
                "response_ids": response.values.numpy(),
            }
        replica = self.heads.get(self._held(stage))
        if stage == "place":
            return {"sent_bytes": 1, "received_bytes": 1, "kept_bytes": 1}
        if replica is None:
            return None
        if stage == "update":
            return {f"actor/{n}": [0.0] for n in range(10)}
        samples = tuple(range(replica * self.each, (replica + 1) * self.each))
        return {"samples": samples, "entropy": np.zeros(self.each, np.float32), "values": None}


@contextlib.contextmanager
def our_row() -> Iterator[None]:
    """Row dispatch.put_once."""
    kept = RayWorkerGroup.execute_all_async
    RayWorkerGroup.execute_all_async = put_before_calling(kept)
    try:
        yield
    finally:
        RayWorkerGroup.execute_all_async = kept


def copies(group: Any) -> Callable[[str, DataProto], Any]:
    """(method, batch) -> answers: every worker is given its replica's chunk itself, as at verl 54c9b736."""

    def call(method: str, batch: DataProto) -> Any:
        chunks = batch.chunk(group.dp_size)
        replicas = [group.get_megatron_rank_info(rank=rank).dp_rank for rank in range(group.world_size)]
        return group.execute_all_sync(method, [chunks[replica] for replica in replicas])

    return call


def own(group: Any) -> Callable[[str, DataProto], Any]:
    """(method, batch) -> answers, by the imported verl's dispatch."""
    return lambda method, batch: getattr(group, method)(batch)


def cluster(store_bytes: int) -> None:
    """A Ray of this benchmark's own."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "tests/tensor_cache"), os.environ.get("PYTHONPATH")])
    )
    os.environ["RAY_worker_niceness"] = "0"  # at Ray's 15 whatever else runs here goes before the actors
    os.environ.update(
        OMP_NUM_THREADS="1",
        RAY_USAGE_STATS_ENABLED="0",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        MALLOC_MMAP_THRESHOLD_="1000000",
    )  # actors give back what a batch took
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store_bytes)


def heads_of(group: Any) -> dict[int, int]:
    """{rank: replica} of those that verl takes the answers of."""
    infos = [group.get_megatron_rank_info(rank=rank) for rank in range(group.world_size)]
    last = max(info.pp_rank for info in infos)
    return {rank: info.dp_rank for rank, info in enumerate(infos) if info.tp_rank == 0 and info.pp_rank == last}


# -- bytes ------------------------------------------------------------------------------------------------------------


class Counted:
    """Bytes that this process and the actors serialise, by way."""

    def __init__(self, actors: list[Any]):
        self.actors, self.found = actors, {}

    @contextlib.contextmanager
    def way(self, name: str, times: int = 1) -> Iterator[None]:
        """Added to the way's {sent, back}, `times` over."""
        ray.get([actor.serialised.remote() for actor in self.actors])
        with Serialised() as seen:
            yield
        back = sum(ray.get([actor.serialised.remote() for actor in self.actors]))
        way = self.found.setdefault(name, {"sent": 0, "back": 0})
        way["sent"] += times * sum(seen.sizes)
        way["back"] += times * back


def byte_figures() -> Iterator[dict[str, Any]]:
    """Those of a step."""
    cluster(5 << 30)
    group, actors = group_of(Host, 16, WORLD)
    group.lay_out(tp=TP, dp=DP, pp=PP)
    prompts, responses = lengths()
    counted = Counted(actors)

    def stand(responses: list[int]) -> None:
        ray.get(
            [
                actor.stand_for.remote(list(range(WORLD))[n::16], SAMPLES, heads_of(group), prompts, responses)
                for n, actor in enumerate(actors)
            ]
        )

    stand(responses)
    ways = {
        "a copy a worker": (copies, contextlib.nullcontext),
        "put once": (copies, our_row),
        f"own dispatch of verl {verl.__version__}": (own, contextlib.nullcontext),
    }
    for name, (how, row) in tqdm(ways.items(), desc="bytes", unit="way"):
        step = Step(group, how(group))
        with row():
            with counted.way(name):
                batch = step.generate(prompts_of(PROMPTS, prompts))
            batch = batch[: SAMPLES // BYTES_SCALE]
            part = DataProto(batch.batch.contiguous(), batch.non_tensor_batch, dict(batch.meta_info))
            part.meta_info["global_token_num"] = part.meta_info["global_token_num"][: len(part)]
            with counted.way(name, BYTES_SCALE):
                step.train(part)
    for name, of in (("ours", responses), ("ours, every response of 3072 tokens", [RESPONSE] * SAMPLES)):
        stand(of)
        kept = TensorCacheGroup(group, CachedStep(0, RESPONSE, True, False))
        step = Step(kept, own(kept))
        with our_row(), counted.way(name):
            step.train(balanced(step.generate(prompts_of(PROMPTS, prompts))))
    ray.shutdown()
    found = {name: {**way, "all": way["sent"] + way["back"]} for name, way in counted.found.items()}
    peers = {name: found[name] for name in ways}
    yield figure(
        "host bytes of a step, 256 workers, balance_batch on",
        found["ours"]["all"],
        "B",
        BOUND_BYTES,
        peers,
        **found["ours"],
        scale_of_peers=f"generation 1, other calls 1/{BYTES_SCALE} x {BYTES_SCALE}",
        mean_response=round(statistics.mean(responses), 1),
    )
    worst = found["ours, every response of 3072 tokens"]
    yield figure("the same, every response of 3072 tokens", worst["all"], "B", None, None, **worst)


# -- start skew -------------------------------------------------------------------------------------------------------


def skews_of(actors: list[Any], run: Callable[[], None]) -> dict[str, float]:
    """Of every call of a step; what the actors do before is not counted."""
    ray.get([actor.starts.remote() for actor in actors])
    run()
    return start_skew(ray.get([actor.starts.remote() for actor in actors]))


class Held(LogicalGroup):
    """Says by a file in `folder`, for each call, when its workers may answer: WORK_S after the last has been called."""

    folder, calls = "", 0

    def execute_all_async(self, *args: Any, **kwargs: Any) -> Any:
        """verl's."""
        answers = super().execute_all_async(*args, **kwargs)
        self.calls += 1
        threading.Timer(WORK_S, Path(self.folder, str(self.calls)).touch).start()
        return answers


def measured(count: int, made: list[Any], repeats: int, of: tuple[list[int], list[int]], folder: str) -> dict[str, Any]:
    """{way: skew by call of every repeat} with `count` workers; ways take turns. `folder`: an empty one."""
    names = [str(n) for n in range(count)]
    group = Held(
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Host)), worker_names=names, worker_handles=made[:count]
    ).lay_out(tp=4, dp=count // 4, pp=1)
    group.folder = folder
    prompts, responses = of
    per_worker = SAMPLES // WORLD  # samples that a worker generates
    samples = count * per_worker
    ray.get(
        [
            actor.stand_for.remote([n], samples, heads_of(group), prompts, responses, folder)
            for n, actor in enumerate(made[:count])
        ]
    )
    asked = prompts_of(samples // EACH, prompts)
    kept = TensorCacheGroup(group, CachedStep(0, RESPONSE, True, False))
    whole = Step(group, own(group)).generate(asked)
    each = SAMPLES // DP // SKEW_SCALE
    picked = [at % len(whole) for at in range(group.dp_size * each)]
    batch = whole.select_idxs(picked)
    batch.meta_info = {"global_token_num": [1000] * len(batch)}

    def peers(how: Callable) -> Callable[[], None]:
        def run() -> None:
            group.generate_sequences(asked)
            Step(group, how(group)).train(
                DataProto(batch.batch.clone(False), dict(batch.non_tensor_batch), dict(batch.meta_info))
            )

        return run

    def ours() -> None:
        step = Step(kept, own(kept))
        step.train(step.generate(asked))

    ways = {
        "a copy a worker": (peers(copies), contextlib.nullcontext),
        f"own dispatch of verl {verl.__version__}": (peers(own), contextlib.nullcontext),
        "ours": (ours, our_row),
        "calls without arguments": (lambda: [group.nothing() for _ in range(5)], our_row),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for at in tqdm(range(repeats + 1), desc=f"{count} actors", unit="round"):
        for name, (run, row) in ways.items():
            with row():
                skew = skews_of(made[:count], run)
            if at:  # the first is for warming up
                found[name].append(skew)
            time.sleep(0.2)
    return found


def skew_figures(repeats: int) -> Iterator[dict[str, Any]]:
    """Measured with 8, 16 and 32 workers, and the line through them."""
    cluster(2 << 30)
    of = lengths()
    made = [ray.remote(num_cpus=0)(Host).remote() for _ in range(32)]
    found = {}
    for count in (8, 16, 32):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found[count] = measured(count, made, repeats, of, folder)
    ray.shutdown()
    worst = {
        count: {way: [max(by_call.values()) for by_call in each] for way, each in ways.items()}
        for count, ways in found.items()
    }
    middle = {count: {way: statistics.median(each) for way, each in ways.items()} for count, ways in worst.items()}
    told = {
        count: {
            way: {
                "median": round(middle[count][way], 5),
                "least": min(each),
                "most": max(each),
                "by_call": {
                    call: statistics.median(by_call[call] for by_call in found[count][way])
                    for call in found[count][way][0]
                },
            }
            for way, each in ways.items()
        }
        for count, ways in worst.items()
    }
    copy_a_worker, verls, *_ = (middle[32][way] / middle[32]["ours"] for way in middle[32])
    yield {
        **figure(
            "start skew, 32 actors, times less than a copy a worker",
            round(copy_a_worker, 1),
            "x",
            BOUND_TIMES,
            {way: middle[32][way] for way in middle[32]},
        ),
        "fine": copy_a_worker >= BOUND_TIMES,
        "seconds": told,
        "repeats": repeats,
        "batch_scale_of_peers": f"1/{SKEW_SCALE}",
    }
    yield figure(
        "start skew, 32 actors, times less than verl's own dispatch, which puts a batch once a DP rank at 0.4.0",
        round(verls, 1),
        "x",
        None,
        None,
    )
    line = {way: model(middle, way, WORLD) for way in middle[32]}
    yield figure(
        "start skew, 256 workers, MODELLED by a line through 8, 16, 32", line.pop("ours"), "s", BOUND_MODEL_S, line
    )


def model(middle: dict[int, dict[str, float]], way: str, count: int) -> float:
    """Seconds by least squares; not below what 32 had."""
    slope, start = np.polyfit(list(middle), [ways[way] for ways in middle.values()], 1)
    return round(max(float(start + slope * count), middle[32][way]), 4)


def figure(name: str, value: float, unit: str, bound: float | None, peer: Any, **more: Any) -> dict[str, Any]:
    """One line of the answer; `value` must not exceed `bound`."""
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "bound": bound,
        "peer": peer,
        "fine": bound is None or value <= bound,
        **more,
    }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("bytes", "skew"))
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints
        found = [
            *(byte_figures() if asked.only != "skew" else ()),
            *(skew_figures(asked.repeats) if asked.only != "bytes" else ()),
        ]
    fine = all(line["fine"] for line in found)
    print(json.dumps({"name": "dispatch", "verl": verl.__version__, "figures": found, "fine": fine}, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
