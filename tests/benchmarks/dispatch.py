"""Measure the bytes that a step of the 256-die run serialises on the host. Run by hand:

    python tests/benchmarks/dispatch.py [--prompts 512]

Prints JSON: a list of figures, each with `value`, `bound` (null: reported only) and `peer` (other ways in the
same run). Exits 1 where a bound is missed. verl's real RayWorkerGroup, Megatron dispatch and DataProto; the workers
answer with what verl's would (shapes and dtypes), without a model. `prompts` x 16 responses, prompt <= 1024 and
response <= 3072 tokens, lengths lognormal, cv .55, mean response 983 (tests/step/batches/lengths.py). Ways of sending:

    own dispatch     the imported verl's: 0.4.0 puts a Megatron batch into Ray's store once a DP rank. With
                     PYTHONPATH=<verl 54c9b736> it is that one's, which serialises a copy for each worker
    ours             row dispatch.put_once, and recipe.tensor_cache.enabled (trainer/worker_group.py)

256 logical workers (TP4 x PP8 x DP8) in 16 Ray actors. All that Ray serialises for calls (`sent`) and for their
answers, which the controller fetches from every worker (`back`), counted in its serialiser. `ours` and generation are
at full scale; the other calls of other ways on 1/32 of the samples, times 32.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import ray
import torch
import verl
from report import ROOT, argument_parser, figure, print_report
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayWorkerGroup
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from tests.runs import composed, trainer_config
from tests.step.batches.lengths import PROMPT, RESPONSE, lognormal_lengths
from tests.step.batches.logical_group import make_group, serialised_sizes
from verl_patches.step.batches.exchange import RaggedTensor, model_inputs, packed_ids
from verl_patches.step.batches.payloads import ExchangeReport, LogProbs, ResponseIds
from verl_patches.trainer import worker_group
from verl_patches.trainer.dispatch import put_before_calling

EACH, WORLD, VOCABULARY = 16, 256, 129_280
DP, PP, TP = 8, 8, 4
SCALE, BOUND_BYTES = 32, 0.03e9


class Host:
    """Stand for workers `ranks` of `dp` replicas in one actor, which the group calls for each of them in turn."""

    def __init__(self):
        self.counting = serialised_sizes()
        self.sizes = self.counting.__enter__()

    def stand_for(self, ranks, samples, heads, prompts, responses):
        """Take the workers' facts; `heads`: {rank of a replica's head: its number}; lengths of all samples."""
        self.ranks, self.heads, self.asked = ranks, heads, {}
        self.each = samples // max(len(heads), 1)
        self.lengths = prompts, responses

    def serialised(self):
        """Return the bytes of all answers since the last call."""
        total = sum(self.sizes)
        self.sizes.clear()
        return total

    def _rank(self, method):
        """Return the rank that this call is for."""
        self.asked[method] = self.asked.get(method, 0) + 1
        return self.ranks[(self.asked[method] - 1) % len(self.ranks)]

    def _ids(self, count, rank):
        lengths = [tuple(of[rank * count : (rank + 1) * count]) for of in self.lengths]
        return [RaggedTensor(torch.randint(VOCABULARY, (sum(of),), dtype=torch.int32), of) for of in lengths]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts):
        """Answer as vLLMRollout.generate_sequences."""
        count = len(prompts) * EACH
        tensors = model_inputs(*self._ids(count, self._rank("generate")), PROMPT, RESPONSE, 0)
        return DataProto.from_dict({**tensors, "rollout_log_probs": torch.zeros(count, RESPONSE)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data):
        """Answer as ActorRolloutRefWorker does on every rank."""
        shape = data.batch["responses"].shape
        return DataProto.from_dict({"old_log_probs": torch.zeros(shape), "entropys": torch.zeros(shape)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data):
        """Answer as ActorRolloutRefWorker does on every rank."""
        return DataProto.from_dict({"ref_log_prob": torch.zeros(data.batch["responses"].shape)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_actor(self, data):
        """Answer as ActorRolloutRefWorker does on every rank."""
        return DataProto(meta_info={"metrics": {f"actor/{n}": [0.0] for n in range(10)}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate_cached(self, prompts):
        """Answer as worker/recipe_worker.py; so do the methods below."""
        _, response = self._ids(len(self.lengths[0]) // WORLD, self._rank("generate"))
        return ResponseIds(np.array(response.lengths, np.int32), packed_ids(response.values.numpy()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place_cached(self, placement):
        """Answer for every rank."""
        return ExchangeReport(1, 1, 1, 1.0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log_prob_cached(self, send_back):
        """Answer for a replica's head."""
        replica = self.heads.get(self._rank("log_prob"))
        if replica is None:
            return None
        samples = np.arange(replica * self.each, (replica + 1) * self.each, dtype=np.int32)
        return LogProbs(samples, np.zeros(self.each, np.float32), None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ref_log_prob_cached(self, send_back):
        """Answer for a run without KL in the reward."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_cached(self, advantages):
        """Answer for a replica's head."""
        head = self._rank("update") in self.heads
        return {f"actor/{n}": [0.0] for n in range(10)} if head else None


def cluster(store_bytes: int) -> None:
    """Start a Ray of this benchmark's own and stop it afterwards."""
    folders = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    os.environ["RAY_worker_niceness"] = "0"  # at Ray's 15 other processes of this machine go before the actors
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # actors return the memory of a batch
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store_bytes)


def group_heads(group: Any) -> dict[int, int]:
    """Return {rank: replica} of the ranks whose answers verl takes."""
    infos = [group.get_megatron_rank_info(rank=rank) for rank in range(group.world_size)]
    last = max(info.pp_rank for info in infos)
    return {rank: info.dp_rank for rank, info in enumerate(infos) if info.tp_rank == 0 and info.pp_rank == last}


# -- a step of the 256-die run as verl's fit() has it for its workers, with invented tokens --------------------------


def lengths(samples: int) -> tuple[list[int], list[int]]:
    """Return the tokens of each prompt (by sample) and response."""
    both = lognormal_lengths(samples, 0.55, seed=1)
    prompts = [min(min(both[at : at + EACH]) - 1, 200) for at in range(0, samples, EACH) for _ in range(EACH)]
    return prompts, [min(total - prompt, RESPONSE) for total, prompt in zip(both, prompts, strict=True)]


def make_prompts(count: int, of_sample: list[int]) -> DataProto:
    """Return the batch that fit() passes to generate_sequences."""
    lengths = tuple(of_sample[: count * EACH : EACH])
    ids = RaggedTensor(torch.randint(VOCABULARY, (sum(lengths),)), lengths)
    tensors = model_inputs(ids, RaggedTensor(torch.zeros(0), (0,) * count), PROMPT, 0, 0)
    raw = np.empty(count, dtype=object)
    raw[:] = [part.tolist() for part in ids.parts()]
    names = "input_ids", "attention_mask", "position_ids"
    return DataProto.from_dict({name: tensors[name] for name in names}, {"raw_prompt_ids": raw})


def cached_group(group: Any) -> worker_group.RecipeWorkerGroup:
    """Return the trainer's worker group with the tensor cache."""
    overrides = ["recipe.tensor_cache.enabled=true", f"data.max_response_length={RESPONSE}"]
    config, tokenizer = trainer_config(composed("deepseekv3_tiny_cpu", overrides)), SimpleNamespace(pad_token_id=0)
    trainer = SimpleNamespace(config=config, tokenizer=tokenizer, global_steps=1)
    with mock.patch.object(worker_group, "is_on", lambda row: True):
        return worker_group.RecipeWorkerGroup(group, trainer, lambda step, name: None)


# verl's fit() as workers see it: the tensors of its batch at each call


def generate(group: Any, prompts: DataProto) -> DataProto:
    """Generate and return the batch with the tensors that fit() adds."""
    batch = group.generate_sequences(prompts)
    batch.non_tensor_batch.update(columns(len(batch)))
    batch.batch["response_mask"] = batch.batch["attention_mask"][:, -RESPONSE:].clone()
    batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
    return batch


def train(group: Any, batch: DataProto) -> None:
    """Make the step's other three calls."""
    shape = batch.batch["responses"].shape
    group.compute_log_prob(batch)
    batch.batch["old_log_probs"] = torch.zeros(shape)
    group.compute_ref_log_prob(batch)
    scores = batch.batch["response_mask"] * torch.arange(float(len(batch)))[:, None]
    for name in ("ref_log_prob", "token_level_scores", "token_level_rewards", "advantages", "returns"):
        batch.batch[name] = scores.clone()
    batch.meta_info["temperature"] = 0.9
    group.update_actor(batch)


def columns(count: int) -> dict[str, np.ndarray]:
    """Return the data set's columns, by sample."""
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
    """Reorder samples as trainer.balance_batch."""
    tokens = batch.batch["attention_mask"].sum(-1).tolist()
    parts = get_seqlen_balanced_partitions(tokens, k_partitions=WORLD, equal_size=True)
    batch.reorder(torch.tensor([sample for part in parts for sample in part]))
    return batch


def figures(questions: int) -> Iterator[dict[str, Any]]:
    """Return the figures of a step of that many prompts."""
    samples = questions * EACH
    cluster(5 << 30)
    group, actors = make_group(Host, 16, WORLD)
    group.lay_out(tp=TP, dp=DP, pp=PP)
    prompts, responses = lengths(samples)
    found: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def counted(name: str, times: int = 1) -> Iterator[None]:
        """Add the bytes that this process and the actors serialise inside, times `times`, to way `name`."""
        ray.get([actor.serialised.remote() for actor in actors])
        with serialised_sizes() as sizes:
            yield
        way = found.setdefault(name, {"sent": 0, "back": 0})
        way["sent"] += times * sum(sizes)
        way["back"] += times * sum(ray.get([actor.serialised.remote() for actor in actors]))

    def stand(responses: list[int]) -> None:
        heads, ranks = group_heads(group), range(WORLD)
        for n, actor in enumerate(actors):
            ray.get(actor.stand_for.remote(list(ranks[n::16]), samples, heads, prompts, responses))

    stand(responses)
    verls = f"own dispatch of verl {verl.__version__}"
    with counted(verls):
        batch = generate(group, make_prompts(questions, prompts))
    batch = batch[: samples // SCALE]
    part = DataProto(batch.batch.contiguous(), batch.non_tensor_batch, dict(batch.meta_info))
    part.meta_info["global_token_num"] = part.meta_info["global_token_num"][: len(part)]
    with counted(verls, SCALE):
        train(group, part)
    put_once = mock.patch.object(
        RayWorkerGroup, "execute_all_async", put_before_calling(RayWorkerGroup.execute_all_async)
    )
    for name, of in (("ours", responses), ("ours, every response of 3072 tokens", [RESPONSE] * samples)):
        stand(of)
        with put_once, counted(name):
            cached = cached_group(group)
            train(cached, balanced(generate(cached, make_prompts(questions, prompts))))
    ray.shutdown()
    for way in found.values():
        way["all"] = way["sent"] + way["back"]
    peers = {verls: found[verls]}
    scale = f"generation 1, other calls 1/{SCALE} x {SCALE}"
    more = {**found["ours"], "scale_of_peers": scale, "mean_response": round(statistics.mean(responses), 1)}
    name = "host bytes of a step, 256 workers, balance_batch on"
    yield figure(name, found["ours"]["all"], "B", BOUND_BYTES, peers, **more)
    worst = found["ours, every response of 3072 tokens"]
    yield figure("the same, every response of 3072 tokens", worst["all"], "B", None, None, **worst)


def main() -> int:
    """Measure and print the report."""
    given = argument_parser(__doc__, prompts=512).parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints
        lines = list(figures(given.prompts))
    return print_report("dispatch", lines, verl=verl.__version__)


if __name__ == "__main__":
    sys.exit(main())
