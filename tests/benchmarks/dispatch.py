"""What a step of the 256-die run serialises on the host, and how far apart its workers start. Run by hand:

    python tests/benchmarks/dispatch.py [--only bytes|skew] [--repeats 5]

Prints JSON: a list of figures, each with `value`, `bound` (null: reported only) and `peer` (other ways in the
same run). Exits 1 where a bound is missed. verl's real RayWorkerGroup, Megatron dispatch and DataProto; the workers
answer with what verl's would (shapes and dtypes), without a model. 512 prompts x 16 responses, prompt <= 1024 and
response <= 3072 tokens, lengths lognormal, cv .55, mean response 983 (tests/batches/lengths.py). Ways of sending:

    copy a worker    each worker's batch serialised in its own call: verl 54c9b736; 0.4.0 for what is not Megatron's
    own dispatch     the imported verl's: 0.4.0 puts a Megatron batch into Ray's store once a DP rank. With
                     PYTHONPATH=<verl 54c9b736> it is that one's
    put once         row dispatch.put_once under a copy a worker
    ours             row dispatch.put_once, and recipe.tensor_cache.enabled (batches/cached_step.py)

bytes   256 logical workers (TP4 x PP8 x DP8) in 16 Ray actors. All that Ray serialises for calls (`sent`) and for their
        answers, which the controller fetches from every worker (`back`), counted in its serialiser. `ours` and
        generation are at full scale; the other calls of other ways on 1/32 of the samples, times 32.
skew    8, 16 and 32 actors, one worker each, started by verl's calls of a step, the worst of its calls
        (trainer/dispatch.py), median of the repeats. Our messages are those of a whole step of 32 samples a
        worker; for other ways a worker's batch is 1/8 of what a DP rank has in the 256-die run. For 256 a straight
        line through the medians: a model, no measurement. Workers answer half a second after the last has been called,
        where real ones' devices work: otherwise the answers of the first would take the cores of this machine, which
        all actors share, from the last. Unpickling in turn on them is most of what is left of ours; no network.
        Needs 16 GB: an actor has torch.
"""

from __future__ import annotations

import contextlib
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
from report import ROOT, figure, parser_of, print_report
from tqdm import tqdm
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from tests.batches.lengths import PROMPT, RESPONSE, lognormal_lengths
from tests.batches.logical_group import LogicalGroup, Serialised, group_of
from verl_patches.batches.cached_step import CachedStep, TensorCacheStages
from verl_patches.batches.exchange import Ragged, model_inputs
from verl_patches.trainer.dispatch import put_before_calling, record_starts, start_skew, take_starts

PROMPTS, EACH, WORLD, VOCABULARY = 512, 16, 256, 129_280
SAMPLES = PROMPTS * EACH
DP, PP, TP = 8, 8, 4
BYTES_SCALE, SKEW_SCALE = 32, 8
WORK_S = 0.5
BOUND_BYTES, BOUND_TIMES, BOUND_MODEL_S = 0.06e9, 50, 0.5
register = record_starts(register)


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
        lengths = [tuple(of[rank * count : (rank + 1) * count]) for of in self.lengths]
        return [Ragged(torch.randint(VOCABULARY, (sum(of),), dtype=torch.int32), of) for of in lengths]

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
        """batches/cached_stages.py, answers of every stage."""
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
    folders = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    os.environ["RAY_worker_niceness"] = "0"  # at Ray's 15 other processes of this machine go before the actors
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # actors return the memory of a batch
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store_bytes)


def heads_of(group: Any) -> dict[int, int]:
    """{rank: replica} of those that verl takes the answers of."""
    infos = [group.get_megatron_rank_info(rank=rank) for rank in range(group.world_size)]
    last = max(info.pp_rank for info in infos)
    return {rank: info.dp_rank for rank, info in enumerate(infos) if info.tp_rank == 0 and info.pp_rank == last}


# -- a step of the 256-die run as verl's fit() has it for its workers, with invented tokens --------------------------


def lengths() -> tuple[list[int], list[int]]:
    """Tokens of every prompt (by sample) and response."""
    both = lognormal_lengths(SAMPLES, 0.55, seed=1)
    prompts = [min(min(both[at : at + EACH]) - 1, 200) for at in range(0, SAMPLES, EACH) for _ in range(EACH)]
    return prompts, [min(total - prompt, RESPONSE) for total, prompt in zip(both, prompts, strict=True)]


def prompts_of(count: int, of_sample: list[int]) -> DataProto:
    """What fit() gives to generate_sequences."""
    lengths = tuple(of_sample[: count * EACH : EACH])
    ids = Ragged(torch.randint(VOCABULARY, (sum(lengths),)), lengths)
    tensors = model_inputs(ids, Ragged(torch.zeros(0), (0,) * count), PROMPT, 0, 0)
    raw = np.empty(count, dtype=object)
    raw[:] = [part.tolist() for part in ids.parts()]
    names = "input_ids", "attention_mask", "position_ids"
    return DataProto.from_dict({name: tensors[name] for name in names}, {"raw_prompt_ids": raw})


class Step:
    """verl's fit() as far as workers see it: which tensors its batch has at which call."""

    def __init__(self, group: Any, call: Callable[[str, DataProto], Any]):
        self.group, self.call = group, call

    def generate(self, prompts: DataProto) -> DataProto:
        """The batch with what fit() adds."""
        batch = self.group.generate_sequences(prompts)
        batch.non_tensor_batch.update(columns(len(batch)))
        batch.batch["response_mask"] = batch.batch["attention_mask"][:, -RESPONSE:].clone()
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return batch

    def train(self, batch: DataProto) -> None:
        """The other three calls."""
        shape = batch.batch["responses"].shape
        self.call("compute_log_prob", batch)
        batch.batch["old_log_probs"] = torch.zeros(shape)
        self.call("compute_ref_log_prob", batch)
        scores = batch.batch["response_mask"] * torch.arange(float(len(batch)))[:, None]
        for name in ("ref_log_prob", "token_level_scores", "token_level_rewards", "advantages", "returns"):
            batch.batch[name] = scores.clone()
        batch.meta_info["temperature"] = 0.9
        self.call("update_actor", batch)


def columns(count: int) -> dict[str, np.ndarray]:
    """What comes from the data set, by sample."""
    values = {
        "uid": ["8d1cd5f4-0000-4f6e-a1a4-5a39d8f0a2a6"] * count,
        "data_source": ["deepscaler"] * count,
        "ability": ["math"] * count,
        "reward_model": [{"style": "rule", "ground_truth": "42"}] * count,
        "extra_info": [{"split": "train", "index": 7}] * count,
        "index": list(range(count)),
    }
    return {name: np.array(column, dtype=object) for name, column in values.items()}


def balanced(batch: DataProto) -> DataProto:
    """As trainer.balance_batch."""
    tokens = batch.batch["attention_mask"].sum(-1).tolist()
    parts = get_seqlen_balanced_partitions(tokens, k_partitions=WORLD, equal_size=True)
    batch.reorder(torch.tensor([sample for part in parts for sample in part]))
    return batch


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
        heads, ranks = heads_of(group), range(WORLD)
        for n, actor in enumerate(actors):
            ray.get(actor.stand_for.remote(list(ranks[n::16]), SAMPLES, heads, prompts, responses))

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
        kept = TensorCacheStages(group, CachedStep(0, RESPONSE, True, False))
        step = Step(kept, own(kept))
        with our_row(), counted.way(name):
            step.train(balanced(step.generate(prompts_of(PROMPTS, prompts))))
    ray.shutdown()
    found = {name: {**way, "all": way["sent"] + way["back"]} for name, way in counted.found.items()}
    peers = {name: found[name] for name in ways}
    scale = f"generation 1, other calls 1/{BYTES_SCALE} x {BYTES_SCALE}"
    more = {**found["ours"], "scale_of_peers": scale, "mean_response": round(statistics.mean(responses), 1)}
    name = "host bytes of a step, 256 workers, balance_batch on"
    yield figure(name, found["ours"]["all"], "B", BOUND_BYTES, peers, **more)
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
    cls = RayClassWithInitArgs(ray.remote(Host))
    group = Held(ray_cls_with_init=cls, worker_names=names, worker_handles=made[:count])
    group.lay_out(tp=4, dp=count // 4, pp=1)
    group.folder = folder
    samples = count * (SAMPLES // WORLD)  # as many as a worker generates
    heads = heads_of(group)
    ray.get([actor.stand_for.remote([n], samples, heads, *of, folder) for n, actor in enumerate(made[:count])])
    asked = prompts_of(samples // EACH, of[0])
    kept = TensorCacheStages(group, CachedStep(0, RESPONSE, True, False))
    whole = Step(group, own(group)).generate(asked)
    each = SAMPLES // DP // SKEW_SCALE
    picked = [at % len(whole) for at in range(group.dp_size * each)]
    batch = whole.select_idxs(picked)
    batch.meta_info = {"global_token_num": [1000] * len(batch)}

    def peers(how: Callable) -> Callable[[], None]:
        def run() -> None:
            group.generate_sequences(asked)
            copy = DataProto(batch.batch.clone(False), dict(batch.non_tensor_batch), dict(batch.meta_info))
            Step(group, how(group)).train(copy)

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
    middle: dict[int, dict[str, float]] = {}  # workers: {way: median over repeats of the worst call}
    details: dict[int, dict[str, Any]] = {}
    for count, ways in found.items():
        middle[count], details[count] = {}, {}
        for way, repeated in ways.items():
            worst = [max(by_call.values()) for by_call in repeated]
            middle[count][way] = statistics.median(worst)
            by_call = {call: statistics.median(skew[call] for skew in repeated) for call in repeated[0]}
            ends = {"median": round(middle[count][way], 5), "least": min(worst), "most": max(worst)}
            details[count][way] = {**ends, "by_call": by_call}
    copy_a_worker, verls, *_ = (middle[32][way] / middle[32]["ours"] for way in middle[32])
    more = {"seconds": details, "repeats": repeats, "batch_scale_of_peers": f"1/{SKEW_SCALE}"}
    more["fine"] = copy_a_worker >= BOUND_TIMES
    name = "start skew, 32 actors, times less than"
    yield figure(f"{name} a copy a worker", round(copy_a_worker, 1), "x", BOUND_TIMES, middle[32], **more)
    name = f"{name} verl's own dispatch, which puts a batch once a DP rank at 0.4.0"
    yield figure(name, round(verls, 1), "x", None)
    line = {way: model(middle, way, WORLD) for way in middle[32]}
    name = "start skew, 256 workers, MODELLED by a line through 8, 16, 32"
    yield figure(name, line.pop("ours"), "s", BOUND_MODEL_S, line)


def model(middle: dict[int, dict[str, float]], way: str, count: int) -> float:
    """Seconds by least squares; not below what 32 had."""
    slope, start = np.polyfit(list(middle), [ways[way] for ways in middle.values()], 1)
    return round(max(float(start + slope * count), middle[32][way]), 4)


def main() -> int:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--only", choices=("bytes", "skew"))
    given, figures = parser.parse_args(), []
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints
        if given.only != "skew":
            figures += byte_figures()
        if given.only != "bytes":
            figures += skew_figures(given.repeats)
    return print_report("dispatch", figures, verl=verl.__version__)


if __name__ == "__main__":
    sys.exit(main())
