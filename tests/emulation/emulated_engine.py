"""Compare engines of vllm-ascend on platform npu_emulated, several in one process, with transformers in fp32.

`main(models, cases)` builds each case's engine and runs its checks in order. A case is
    {"model": name, "options": arguments of LLM, "without": row ids, "checks": {name: {...}, ...}}
with, for each check, all optional:
    "lengths": of the prompts, "tokens": how many are generated, "without": row ids whose original is put in place
    meanwhile, "before": function of this file, "fault": key of FAULTS or None; with this key no prompt is cached.
The answer: {check: {worst: largest |dlogp| against transformers, teacher-forced, same: whether all greedy tokens are
equal, ...}, ...}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

PROMPT_LENGTHS = (5, 17, 3, 140, 64)
TOKENS = 6
LIMITS = {"max_model_len": 512, "max_num_seqs": 8, "gpu_memory_utilization": 0.5, "dtype": "float32", "seed": 0}


def make_prompts(lengths: Sequence[int], vocab: int = 512) -> list[list[int]]:
    """Return random prompts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


Response = tuple[list[int], list[float]]  # tokens and their log-probs


def response_tokens(output: Any) -> list[Response]:
    """Return all responses of one of vLLM's RequestOutputs."""
    made = output.outputs
    return [(list(o.token_ids), [s[t].logprob for s, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in made]


def reference_responses(model: str) -> Any:
    """Return the model in transformers, in fp32."""
    from transformers import AutoModelForCausalLM

    eager = {"torch_dtype": "float32", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(model, **eager).eval()


def score(reference: Any, ids: list[int], responses: Sequence[Response]) -> tuple[float, bool]:
    """Return (largest |dlogp| of the responses to a prompt, infinite if one is not finite; whether all are greedy)."""
    import torch

    longest = max(len(tokens) for tokens, _ in responses)
    tokens = torch.tensor([made + [0] * (longest - len(made)) for made, _ in responses])  # padding is not compared
    with torch.no_grad():
        logits = reference(torch.cat([torch.tensor([ids] * len(responses)), tokens], 1)).logits[:, len(ids) - 1 : -1]
    expected = logits.float().log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    worst, same = 0.0, True
    for row, best, (made, log_probs) in zip(expected, logits.argmax(-1).tolist(), responses, strict=True):
        difference = torch.tensor(log_probs) - row[: len(log_probs)]
        worst = max(worst, float(difference.abs().nan_to_num(torch.inf).max()))
        same = same and best[: len(made)] == made
    return worst, same


def compare(llm: Any, reference: Any, lengths: Sequence[int] = PROMPT_LENGTHS, tokens: int = TOKENS) -> dict[str, Any]:
    """Generate greedily and score the responses with `reference` (transformers, fp32)."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    asked = make_prompts(lengths)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
    scores = [score(reference, ids, response_tokens(output)) for ids, output in zip(asked, outputs, strict=True)]
    return {"worst": max(worst for worst, _ in scores), "same": all(same for _, same in scores)}


def engine_worker(llm: Any) -> Any:
    """Return the in-process engine's worker, found as verl's sharding manager finds it (megatron_vllm.py)."""
    return llm.llm_engine.model_executor.driver_worker.worker


def engine_model(llm: Any) -> Any:
    """Return the engine's model."""
    return engine_worker(llm).model_runner.model


def record(holder: Any, function: str, fact: Callable) -> list[Any]:
    """Return a list that gets fact(result, *arguments) of each later call of holder.function."""
    upstream, seen = getattr(holder, function), []

    def call(*args: Any, **kwargs: Any) -> Any:
        made = upstream(*args, **kwargs)
        seen.append(fact(made, *args, **kwargs))
        return made

    setattr(holder, function, call)
    return seen


def classes(llm: Any, reference: Any) -> dict[str, Any]:
    """Return the names of the engine's classes, and `kv_cache_bytes` of its worker on a die with these bytes in use."""
    worker = engine_worker(llm)
    found = {"classes": [type(part).__name__ for part in (worker, worker.model_runner, engine_model(llm))]}
    return {**found, "kv_cache_bytes": kv_cache_bytes(worker, **USED_BYTES)}


USED_BYTES = {"total": 64_000, "weights": 20_000, "activations": 500, "beside": 5_000}


def kv_cache_bytes(worker: Any, total: int, weights: int, activations: int, beside: int) -> int:
    """Return the bytes that vllm-ascend's worker leaves the KV cache; beside: of HCCL and CANN, outside of torch."""
    import torch
    import torch_npu

    stats = {"allocated_bytes.all.peak": weights + activations, "allocated_bytes.all.current": weights}
    counters = {"memory_stats": lambda: stats, "mem_get_info": lambda: (total - weights - beside, total)}
    with ExitStack() as patches:
        for module in (torch.npu, torch_npu.npu):
            patches.enter_context(mock.patch.multiple(module, **counters))
        patches.enter_context(mock.patch.object(worker.model_runner, "profile_run"))
        patches.enter_context(mock.patch.object(worker, "init_npu_memory", total))
        return worker.determine_available_memory()


def graphs(llm: Any, reference: Any) -> dict[str, Any]:
    """Return the node counts of torchair's graphs so far, and the streams on which the KV cache is written."""
    import torch_npu
    from vllm import SamplingParams

    from verl_patches.emulation.npu.packages import Graphs

    write, streams = torch_npu.npu_kv_rmsnorm_rope_cache, []

    def note(*args: Any, **kwargs: Any) -> Any:
        streams.append(Graphs.stream)
        return write(*args, **kwargs)

    if not Graphs.traced:
        torch_npu.npu_kv_rmsnorm_rope_cache = note
        params = SamplingParams(temperature=0.0, max_tokens=2)
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
        torch_npu.npu_kv_rmsnorm_rope_cache = write
    return {"streams": streams, "traced": Graphs.traced, "stream_switches": Graphs.stream_switches}


def dropped(llm: Any, reference: Any) -> dict[str, Any]:
    """Ask for a response to a prompt that is longer than a step; return the error, and forget the request."""
    error = refused(lambda: compare(llm, reference, [65]))
    waiting = llm.llm_engine.output_processor
    waiting.abort_requests(list(waiting.request_states))
    return {"error": error}


def sleep(llm: Any, reference: Any) -> dict[str, Any]:
    """Sleep at vLLM's level 1 and wake up; return the share of parameters that are NaN while it sleeps.

    `kept`: the error when the allocator frees nothing.
    """
    from vllm_ascend.device_allocator import camem

    real = {name: getattr(camem, name) for name in ("python_unmap_and_release", "python_create_and_map")}
    vars(camem).update(dict.fromkeys(real, lambda *handle: None))
    kept = refused(lambda: llm.sleep(1))
    llm.wake_up()
    vars(camem).update(real)
    llm.sleep(1)
    parameters = list(engine_model(llm).parameters())
    poisoned = sum(bool(p.isnan().any()) for p in parameters)
    llm.wake_up()
    return {"poisoned": poisoned / len(parameters), "kept": kept}


def refused(do: Callable) -> str:
    """Return the message of the RecipeError that `do` raises; "" without one."""
    from verl_patches.errors import RecipeError

    try:
        do()
    except RecipeError as error:
        return str(error)
    return ""


CYCLES = 50


def cycles(llm: Any, reference: Any) -> dict[str, Any]:
    """Sleep to torch's pool, wake up, write the weights back and make a request; repeat CYCLES times.

    `tokens`: the different responses; `moved`: in how many cycles a weight had another address; `live`: bytes of all
    live tensors after each tenth cycle, `asleep` while it sleeps; `frozen`: the error of a graph that keeps the first
    addresses; `kept`: the error when torch's allocator keeps the freed memory.
    """
    import torch
    from vllm import SamplingParams

    from verl_patches.emulation.npu.packages import Graphs
    from verl_patches.memory.sleep_mode import freeable_weights

    params, request = SamplingParams(temperature=0.0, max_tokens=2), {"prompt_token_ids": make_prompts([5])[0]}
    kept = {name: tensor.detach().clone() for name, tensor in freeable_weights(engine_model(llm)).items()}
    first = {name: tensor.data_ptr() for name, tensor in freeable_weights(engine_model(llm)).items()}

    def slept(measured: bool = False) -> None:
        llm.sleep(1)
        if measured:
            found["asleep"].add(live_bytes())
        other = [torch.full_like(tensor, torch.nan) for tensor in kept.values()]  # takes the place of the weights
        llm.wake_up()
        del other
        with torch.no_grad():
            for name, tensor in freeable_weights(engine_model(llm)).items():
                tensor.copy_(kept[name])
        llm.mark_weights_written(last=False)

    def answer() -> list[int]:
        (output,) = llm.generate([request], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    llm.mark_weights_written(last=False)
    found = {"tokens": {tuple(answer())}, "live": [], "asleep": set(), "moved": 0}
    for cycle in range(CYCLES):
        slept(measured=cycle % 10 == 0)
        found["tokens"].add(tuple(answer()))
        if cycle % 10 == 0:
            found["live"].append(live_bytes())
        found["moved"] += any(t.data_ptr() != first[name] for name, t in freeable_weights(engine_model(llm)).items())
    weights = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    answers = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}
    return {
        **answers,
        "weights": weights,
        "frozen": _frozen(llm, Graphs.configs[-1].experimental_config, slept, answer),
        "kept": _kept(llm, slept),
    }


def _kept(llm: Any, slept: Callable) -> str:
    """Return the error of a sleep whose memory torch's allocator keeps, and restore the state before."""
    import torch

    empty_cache, torch.npu.empty_cache = torch.npu.empty_cache, lambda: None
    torch.npu.memory_reserved()
    said = refused(lambda: llm.sleep(1))
    torch.npu.empty_cache = empty_cache
    slept()
    return said


def _frozen(llm: Any, options: Any, slept: Callable, answer: Callable) -> str:
    """Return the error of the graph as the pinned version compiles it, after its weights have moved."""
    unset, options.frozen_parameter = options.frozen_parameter, True
    try:
        slept()
        answer()
    except ValueError as error:
        return str(error)
    finally:
        options.frozen_parameter = unset
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states))  # the one that failed would never end
    return f"none; the row has set it to {unset}"


def live_bytes() -> int:
    """Return the bytes of the storages of all tensors of this process."""
    import gc

    import torch

    gc.collect()
    real = torch.Tensor, torch.nn.Parameter  # not Dynamo's fake ones
    tensors = [each for each in gc.get_objects() if type(each) in real and each.device.type != "meta"]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


# Faults of a device path, each in one op: (function of torch_npu, changed arguments or result).
EAGER: dict[str, tuple[str, dict[str, Callable]]] = {
    "tokens go to the next expert": ("npu_moe_gating_top_k", {"result": lambda r: (r[0], (r[1] + 1) % 256, r[2])}),
    "experts are chosen without the bias": ("npu_moe_gating_top_k", {"bias": lambda bias: bias * 0}),
    "weights of a token's experts in another order": (
        "npu_moe_gating_top_k",
        {"result": lambda r: (r[0].roll(1, -1), r[1], r[2])},
    ),
    "experts' outputs are not weighted": ("npu_moe_finalize_routing", {"scales": lambda scales: scales * 0 + 0.125}),
    "gate and up projection exchanged": ("npu_swiglu", {"input": lambda x: x.roll(x.shape[-1] // 2, -1)}),
    "one expert's weight transposed": ("npu_grouped_matmul", {"weight": lambda weights: [_transposed(weights[0])]}),
    "rotary positions twice as far": ("_npu_rotary_embedding", {"positions": lambda positions: positions * 2}),
    "KV written to another token's slot": ("_npu_reshape_and_cache", {"slot_indices": lambda slots: slots.roll(1)}),
    "the last cached token is not read": (
        "_npu_paged_attention_mla",
        {"context_lens": lambda lengths: (lengths - 1).clamp(min=1)},
    ),
    "a norm without its weight": ("npu_rms_norm", {"gamma": lambda gamma: gamma * 0 + 1}),
}
# Faults of the ops that only graphs and prompts in chunks call (chunked_prefill_for_mla).
PRODUCTION: dict[str, tuple[str, dict[str, Callable]]] = {
    "a graph does not read the last cached token": (
        "npu_fused_infer_attention_score",
        {"actual_seq_lengths_kv": lambda lengths: [length - (length > 1) for length in lengths]},
    ),
    "a graph writes KV to another token's slot": ("npu_kv_rmsnorm_rope_cache", {"index": lambda slots: slots.roll(1)}),
    "halves of a query are rotated as pairs": (
        "npu_interleave_rope",
        {"x": lambda x: x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)},
    ),
    "a chunk's attention is not causal": ("npu_ring_mla", {"mask_type": lambda _: "no_mask"}),
    "cached keys are read from other blocks": (
        "npu_paged_cache_load",
        {"block_table": lambda table: table.roll(1, -1)},
    ),
}
FAULTS = EAGER | PRODUCTION


def _transposed(weight: Any) -> Any:
    """Return [E, K, N] with the first square of expert 0 transposed."""
    size = min(weight.shape[1:])
    wrong = weight.clone()
    wrong[0, :size, :size] = weight[0, :size, :size].T
    return wrong


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Put the fault into one function of torch_npu inside the context."""
    import torch_npu

    function, changes = FAULTS[name]
    holder = torch_npu.atb if hasattr(torch_npu.atb, function) else torch_npu
    right = getattr(holder, function)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        bound = right.__signature__.bind(*args, **kwargs)
        for argument in changes.keys() - {"result"}:
            bound.arguments[argument] = changes[argument](bound.arguments[argument])
        return changes.get("result", lambda result: result)(right(*bound.args, **bound.kwargs))

    setattr(holder, function, wrong)
    try:
        yield
    finally:
        setattr(holder, function, right)


@contextmanager
def without(rows: list[str]) -> Iterator[None]:
    """Put upstream's own objects in place of `rows` inside the context."""
    from verl_patches.patching import engine

    taken = [engine.current_engine()._rows[name] for name in rows]
    assert [row.state for row in taken] == ["active"] * len(rows)
    for row in taken:
        row.place.restore()
    try:
        yield
    finally:
        for row in taken:
            setattr(row.place.holder, row.place.attribute, row.installed)


def routes(llm: Any, reference: Any) -> dict[str, Any]:
    """Make `routed` count [tokens, those routed otherwise than in fp32 on the same activations] in this check."""
    import torch
    import torch_npu

    route, counted, hidden = torch_npu.npu_moe_gating_top_k, [0, 0], {}
    for layer, ours in zip(reference.model.layers, engine_model(llm).model.layers, strict=True):
        if hasattr(ours.mlp, "gate"):
            gate = ours.mlp.gate
            gate.register_forward_hook(lambda gate, inputs, _, layer=layer: hidden.update(now=(layer, inputs[0])))

    def count(logits: Any, *args: Any, bias: Any, **kwargs: Any) -> Any:
        layer, inputs = hidden["now"]
        gate = layer.mlp.gate
        exact = torch.nn.functional.linear(inputs.float(), gate.weight)
        expected = route(exact, *args, bias=gate.e_score_correction_bias, **kwargs)[1].sort(-1).values
        found = route(logits, *args, bias=bias, **kwargs)
        counted[0] += len(logits)
        counted[1] += int((found[1].sort(-1).values != expected).any(-1).sum())
        return found

    torch_npu.npu_moe_gating_top_k = count
    return {"routed": counted}


def sampled(llm: Any, reference: Any) -> dict[str, Any]:
    """Return how many of 512 tokens top-k 50, top-p 0.9 and both leave in vllm-ascend's sampler; None if it fails."""
    import torch
    from vllm_ascend.patch.worker.patch_common import patch_sampler

    logits = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    left = []
    for k, p in ((50, None), (None, 0.9), (50, 0.9)):
        k, p = (None if each is None else torch.tensor([each]) for each in (k, p))
        with mock.patch.object(patch_sampler, "random_sample") as sample, suppress(RuntimeError):
            patch_sampler.topk_topp_forward_native(None, logits.clone(), {}, k, p)
        left.append(int((sample.call_args.args[0] > 0).sum()) if sample.called else None)
    return {"left": left}


def scaled_twice(llm: Any, reference: Any) -> dict[str, Any]:
    """Scale the routed experts' sum by the square of the model's factor from now on."""
    return _scale(llm, reference.config.routed_scaling_factor**2)


def not_scaled(llm: Any, reference: Any) -> dict[str, Any]:
    """Scale the routed experts' sum by 1 from now on."""
    return _scale(llm, 1.0)


def _scale(llm: Any, factor: float) -> dict[str, Any]:
    llm.reset_prefix_cache()
    for layer in engine_model(llm).model.layers:
        layer.mlp.routed_scaling_factor = factor
    return {}


@contextmanager
def weights_written_back(llm: Any) -> Iterator[None]:
    """Restore every weight, and no buffer, at the end of the block, as a weight sync would."""
    import torch

    from verl_patches.memory.sleep_mode import freeable_weights

    kept = {name: tensor.detach().clone() for name, tensor in freeable_weights(engine_model(llm)).items()}
    yield
    with torch.no_grad():
        for name, tensor in freeable_weights(engine_model(llm)).items():
            tensor.copy_(kept[name])


def named_check(llm: Any, reference: Any, check: dict[str, Any]) -> dict[str, Any]:
    """Run one check of a case."""
    import torch_npu

    found, route = {}, torch_npu.npu_moe_gating_top_k
    with without(check.get("without", [])), fault(check["fault"]) if check.get("fault") else nullcontext():
        if "fault" in check:
            llm.reset_prefix_cache()  # an earlier fault may have written wrong entries
        if "before" in check:
            found |= globals()[check["before"]](llm, reference)
        lengths, tokens = check.get("lengths", PROMPT_LENGTHS), check.get("tokens", TOKENS)
        try:
            if tokens:
                found |= compare(llm, reference, lengths, tokens)
        except ValueError as error:  # platform npu_emulated raises it where an operator's arguments are wrong
            found["refused"] = str(error)
    torch_npu.npu_moe_gating_top_k = route  # where `routes` took its place
    return found


def main(models: dict[str, str], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Run all cases and return their results."""
    import gc

    import verl_patches.prelude_patch  # noqa: F401  before torch, as in a worker

    # isort: split
    import torch
    from vllm import LLM
    from vllm.model_executor.layers import rotary_embedding

    from verl_patches.worker.memory import free_memory_device

    references = {name: reference_responses(path) for name, path in models.items()}
    found = {}
    for case in cases:
        options = {**LIMITS, **case["options"]}
        options["additional_config"] = {"refresh": True, **options.get("additional_config", {})}
        rotary_embedding._ROPE_DICT.clear()  # otherwise engines of one process share their rotary tables
        free_memory_device.value = torch.npu  # as in verl's worker: each sleep is checked
        with without(case.get("without", [])):
            llm = LLM(model=models[case["model"]], **options)
        for name, check in case["checks"].items():
            found[name] = named_check(llm, references[case["model"]], check)
        del llm
        gc.collect()
    return found
