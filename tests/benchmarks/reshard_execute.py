"""The executor of weight syncs, measured on CPU. Run by hand:

    python tests/benchmarks/reshard_execute.py [pairs] [python-time] [--examples 300]

pairs: random (train, rollout) layouts on 4 and 8 gloo ranks, each bit for bit against gather-everything-then-slice;
`value` is how many were equal, and `kinds` how many had what makes a pair hard; those that were not are told on stderr.

python-time: milliseconds of a rank's whole WorkerReshard.sync (is memory as learnt on both ends, the executor, what the
engine derives) outside copies and collectives, at DeepSeek-V3's 256-die layout and real sizes (tensors without memory,
copies and collectives stubbed). Peer: vLLM's own load_weights in the same run, on a rank
of EP256 with all 44,544 expert tensors by name and its copies stubbed. `value` is how many times less; bound 100. Both
are also told with their copies, of matrices so narrow that a copy costs what its call costs.

Prints one JSON object for each; exits 1 where one is not fine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import types
from collections import Counter
from pathlib import Path

from report import ROOT, parser_of, run_python

BOUND = 100.0
MODEL = ROOT / "configs/model/deepseekv3_671b.json"
# as many layers, experts and tensors, but matrices that fit in memory
NARROW = dict(
    hidden_size=64, moe_intermediate_size=8, intermediate_size=64, q_lora_rank=16, kv_lora_rank=16, vocab_size=256,
    num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
)  # fmt: skip
NARROW_BUCKET_BYTES = 34_000  # as many buckets as at real sizes
RANK = 100
TRAIN = "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"


def pairs(examples: int) -> dict:
    """Half of the examples on 4 ranks, half on 8."""
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings

    from tests.ranks import RankError, Ranks
    from tests.reshard import cases, pairs

    kinds, equal, unequal, start = Counter(), Counter(), Counter(), time.perf_counter()
    quiet = dict(verbosity=Verbosity.quiet, suppress_health_check=list(HealthCheck))
    quiet.update(deadline=None, database=None, derandomize=False, phases=[Phase.generate])

    def check(ranks: Ranks) -> None:
        @settings(max_examples=examples // 2, **quiet)
        @given(case=pairs.pairs([ranks.size]))
        def equal_on_all_ranks(case: cases.Case) -> None:
            try:
                outcomes = ranks.run(cases.sync_and_compare, case)
            except RankError as why:
                unequal[ranks.size] += 1
                print(f"{case}\n{why}", file=sys.stderr)
                return
            equal[ranks.size] += 1
            kinds.update(kinds_of(case, outcomes))

        equal_on_all_ranks()

    for size in (4, 8):
        with Ranks(size) as ranks:
            check(ranks)
    value = sum(equal.values())
    return {
        "name": "reshard_pairs",
        "unit": "pairs equal",
        "value": value,
        "bound": examples,
        "fine": value >= examples and not unequal,
        "ranks": dict(equal),
        "unequal": dict(unequal),
        "kinds": dict(sorted(kinds.items())),
        "peer": "slices of the HF tensors",
        "seconds": round(time.perf_counter() - start, 1),
    }


def kinds_of(case, outcomes) -> list[str]:
    """What makes this pair hard."""
    train, rollout, model = case.train, case.rollout, case.model
    facts = {name: getattr(train, name) > 1 for name in ("tp", "cp", "ep", "etp", "pp", "vpp")} | {
        "tp extends ep": train.tp > 1 and train.ep > 1 and train.etp == 1,
        "uneven layers": len(set(train.layers_per_stage)) > 1,
        "empty stage": 0 in train.layers_per_stage,
        "several instances": rollout.edp > 1,
        "rollout pp": rollout.pp > 1,
        "rollout experts cut": rollout.etp > 1,
        "rollout ep does not divide": model.n_routed_experts % rollout.ep > 0,
        "whole tensors": bool(case.whole),
        "padded vocabulary": model.vocab_size % 64 > 0,
        "cast": model.torch_dtype != case.rollout_dtype,
        "more than 8 buckets": outcomes[0].report.collectives > 10,
        "mindspeed": case.train_library == "mindspeed",
    }
    return [name for name, holds in facts.items() if holds]


def python_time() -> dict:
    """Ours, then the peer in a process of its own, since vLLM needs its stand-ins before torch."""
    peer = json.loads(run_python(__file__, "peer", VERL_PATCHES="line=pypi,platform=cpu").splitlines()[-1])
    own = sync_times(671, stubbed=True)
    narrow = {"sync": sync_times(0, stubbed=False), "vllm.load_weights": {"median_ms": peer.pop("narrow_ms")}}
    value = peer["median_ms"] / own["median_ms"]
    return {
        "name": "reshard_python_time",
        "unit": "times less than load_weights",
        "value": round(value, 1),
        "bound": BOUND,
        "fine": value >= BOUND,
        "torch": peer.pop("torch"),
        "sync": own,
        "peer": {"vllm.load_weights": peer},
        "with copies of narrow matrices": narrow,
    }


def sync_times(billions: int, stubbed: bool, runs: int = 30) -> dict:
    """A rank in the middle of the pipeline of 256: 671 billions without memory, or narrow matrices in real memory.

    Collectives are stubbed, copies too if `stubbed`.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from verl_patches.reshard import execute

    copied: list[int] = []
    copy, real = torch._foreach_copy_, execute.raise_on_any_rank

    def count(to, source):
        copied.append(len(to))
        if not stubbed:
            copy(to, source)

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=256)
    execute.raise_on_any_rank = lambda problems, group, device, todo: real(problems, group, "cpu", todo)
    torch._foreach_copy_ = count
    exchange, dist.all_to_all_single = dist.all_to_all_single, lambda *args, **kwargs: _Done()
    try:
        start = time.perf_counter()
        worker, model = _worker(billions)
        made_ms = (time.perf_counter() - start) * 1000
        times = []
        for _ in range(runs):
            copied.clear()
            start = time.perf_counter()
            worker.sync(model)
            times.append((time.perf_counter() - start) * 1000)
    finally:
        torch._foreach_copy_, dist.all_to_all_single, execute.raise_on_any_rank = copy, exchange, real
        dist.destroy_process_group()
    report = worker.reports[-1]
    if report["learnt"] or not report["received_bytes"]:
        raise RuntimeError(f"not the sync that was to be measured: {report}")
    return {
        "median_ms": round(statistics.median(times), 3),
        "max_ms": round(max(times), 3),
        "runs": runs,
        "plan_and_compile_ms_once": round(made_ms),
        "buckets": worker.plan.bucket_count,
        "copies": sum(copied),
        "collectives": report["collectives"],
        "received_gb": round(report["received_bytes"] / 1e9, 6),
    }


def _worker(billions: int) -> tuple:
    """(a WorkerReshard that has learnt both ends, the rollout model): modules with the libraries' names and shapes.

    Only the views of rollout memory, which learning would make, are tensors of their own.
    """
    import torch

    from tests.layout.native_parameters import native_parameters
    from tests.reshard.cases import grow
    from verl_patches.layout.inventory import build_inventory
    from verl_patches.layout.parallel import parse_layout, rollout_layout
    from verl_patches.layout.sharding import local_parameters
    from verl_patches.reshard import live_memory as memory
    from verl_patches.reshard import weight_sync
    from verl_patches.reshard.blocks import DEFAULT_BUCKET_BYTES
    from verl_patches.reshard.destination import Destinations, RolloutTensor
    from verl_patches.reshard.execute import Compiler, Executor
    from verl_patches.reshard.plan import plan_reshard
    from verl_patches.reshard.region import region_of
    from verl_patches.reshard.train_tensors import are_views_of, views_of

    device = "meta" if billions else "cpu"
    inventory = build_inventory(json.loads(MODEL.read_text()) | ({} if billions else NARROW))
    train, rollout = parse_layout(TRAIN), rollout_layout(1, dp=128, tp=2)
    libraries = {"train_library": "megatron-local", "rollout_library": "vllm"}
    bucket_bytes = DEFAULT_BUCKET_BYTES if billions else NARROW_BUCKET_BYTES
    plan = plan_reshard(inventory, train, rollout, **libraries, bucket_bytes=bucket_bytes)

    def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    chunk, model = torch.nn.Module(), torch.nn.Module()
    for module, layout, library in ((chunk, train, "megatron-local"), (model, rollout, "vllm")):
        native = native_parameters(inventory, layout, RANK, library)
        grow(module, {name: zeros(tensor.shape, tensor.dtype) for name, tensor in native.items()})
    for layer in model.get_submodule("model.layers").children():  # vLLM 0.9.1's absorbed projections are views
        holder, layer.self_attn.attn = layer.self_attn.kv_b_proj, torch.nn.Module()
        view = holder.weight.t()
        layer.self_attn.attn.impl = types.SimpleNamespace(kv_b_proj=holder, W_UV=view, W_UK_T=view)
    sources = views_of([dict(chunk.named_parameters())], inventory, train, RANK, "megatron-local")
    places = {}
    for name, shard in local_parameters(inventory, rollout, RANK, "vllm").shards.items():
        region = region_of(shard)
        places[name] = (RolloutTensor(region, zeros(region.shape_in(shard.parameter.shape), shard.dtype), name),)
    live = {name: memory.Live.of(model, name) for name, _ in model.named_parameters()}
    compiler = Compiler(plan.for_rank(RANK), sources, places, inventory, (), 256, device)
    problems = list(compiler.problems())
    if problems:
        raise RuntimeError(problems)
    worker = object.__new__(weight_sync.WorkerReshard)  # its own __init__ and _learn ask Megatron and all ranks
    vars(worker).update(
        settings=types.SimpleNamespace(verify="off"),
        chunks=[chunk],
        rank=RANK,
        device=torch.device("cpu"),
        plan=plan,
        sources=sources,
        destinations=Destinations(RANK, places, (), {}, (), model, live),
        verified=True,
        reports=[],
        executor=Executor(compiler, load_whole=None, finish=lambda: weight_sync.post_load(model)),
    )
    named = [dict(chunk.named_parameters())]  # without verl's unwrap_model, which looks at each chunk once
    weight_sync.still_valid = lambda tensors, chunks: are_views_of(tensors, named)
    return worker, model


class _Done:
    def wait(self) -> None:
        """Nothing was under way."""


def load_weights_times(runs: int = 3) -> dict:
    """A rank of EP256 x TP2: 61 layers, 256 experts, narrow matrices, since time outside copies knows no widths."""
    from verl_patches.emulation import rows as cpu_rows
    from verl_patches.patching.engine import start
    from verl_patches.patching.switches import from_environment

    start([row for row in cpu_rows.VLLM if not row.needs], from_environment()).apply()
    import torch

    from verl_patches.layout.inventory import build_inventory

    config = json.loads(MODEL.read_text()) | NARROW
    config.pop("quantization_config", None)
    model = _vllm_model(config, rank=RANK)
    shapes: dict = {}
    weights, copies = [], []
    for p in build_inventory(config).parameters:
        zeros = torch.zeros(p.shape, dtype=getattr(torch, p.dtype))
        weights.append((p.name, shapes.setdefault((p.shape, p.dtype), zeros)))

    def stub(self, other, *args, **kwargs):
        copies.append(1)
        return self

    def measure() -> list[float]:
        times = []
        for _ in range(runs):
            copies.clear()
            begin = time.perf_counter()
            model.load_weights(weights)
            times.append((time.perf_counter() - begin) * 1000)
        return times

    narrow, torch.Tensor.copy_ = measure(), stub
    times = measure()
    return {
        "median_ms": round(statistics.median(times), 1),
        "min_ms": round(min(times), 1),
        "runs": runs,
        "narrow_ms": round(statistics.median(narrow), 1),
        "copies": len(copies),
        "tensors": len(weights),
        "expert_tensors": sum(".experts." in name for name, _ in weights),
        "torch": torch.__version__,
    }


def _vllm_model(config: dict, rank: int):
    """The real model as it is on `rank` of one instance of DP128 x TP2 with expert parallelism."""
    import tempfile

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM

    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *args, **kwargs: new_group(ranks, backend="fake")
    real = parallel_state.init_model_parallel_group

    def without_queue(ranks, local_rank, backend, use_message_queue_broadcaster=False, group_name=None):
        """Without the shared-memory queue, which waits for its other ranks."""
        return real(ranks, local_rank, backend, False, group_name)

    parallel_state.init_model_parallel_group = without_queue
    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    layout = dict(tensor_parallel_size=2, enable_expert_parallel=True, distributed_executor_backend="external_launcher")
    plain = dict(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, enforce_eager=True)
    engine = EngineArgs(**plain, **layout).create_engine_config()
    engine.parallel_config.data_parallel_size = 128
    engine.parallel_config.data_parallel_rank = rank // 2
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=256)
    with set_current_vllm_config(engine):
        parallel_state._WORLD = parallel_state.init_world_group(list(range(256)), 0, "fake")
        parallel_state.initialize_model_parallel(2, 1, "fake")
        torch.set_default_dtype(torch.bfloat16)
        return DeepseekV3ForCausalLM(vllm_config=engine)


def main() -> int:
    """Measure and print."""
    parser = parser_of(__doc__, examples=300)
    parser.add_argument("what", nargs="*", default=["pairs", "python-time"], help="pairs, python-time")
    given, fine = parser.parse_args(), True
    if given.what == ["peer"]:
        print(json.dumps(load_weights_times()))
        return 0
    for name in given.what:
        result = pairs(given.examples) if name == "pairs" else python_time()
        print(json.dumps(result, indent=1), flush=True)
        fine &= result["fine"]
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
