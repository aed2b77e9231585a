"""Compare the device's operators with plain torch, at the shapes of a run.

An operator gets random tensors of the run's dtype on the device; its reference (verl_patches/reference) gets the same
values in fp32 on the host. An operator that this package computes itself, as on the emulated device, is compared too: a
fault in it is found, but agreement says nothing about a device, and the verdict is `not checked here`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from verl_patches.reference import attention, experts, layers, paged_mla
from verl_patches.spec import A3, RunSpec

OK, WRONG, NOT_CHECKED = "ok", "wrong", "not checked here"
# largest |difference| / largest |expected|: about five roundings of bf16, as kernels keep bf16 inside; fp32 elsewhere
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
BLOCK = 128  # tokens of a KV block: vllm_ascend.platform.NPUPlatform.check_and_update_config
# operators that MindSpeed's op builders compile: module in mindspeed/ops, and its builder
_BUILDERS = {
    "npu_gmm": ("gmm", "GMMFunction.builder"),
    "npu_gmm_backward": ("gmm", "GMMFunction.builder"),
    "npu_gmm_backward_fusion": ("gmm", "GMMFunction.builder"),
    "npu_groupmatmul_add_fp32": ("npu_groupmatmul_add", "groupmatmul_add_op_builder"),
    "npu_matmul_add_fp32": ("npu_matmul_add", "matmul_add_op_builder"),
    "npu_moe_token_permute": ("npu_moe_token_permute", "moe_token_permute_op_builder"),
    "npu_moe_token_unpermute": ("npu_moe_token_unpermute", "moe_token_unpermute_op_builder"),
    "npu_rotary_position_embedding": ("npu_rotary_position_embedding", "rope_op_builder"),
}
_REFERENCES = {**vars(attention), **vars(experts), **vars(layers), **vars(paged_mla)}


def _call(operator: Callable, **arguments: Any) -> Any:
    return operator(**arguments)


@dataclass(frozen=True)
class OperatorCase:
    """Describe a comparison; arguments are on the host, in the run's dtype.

    names: the operators. call: calls them with the arguments. expected: what the reference computes from the arguments;
    None makes the same call with the references of the same names. compared: number of returned tensors that are
    compared. written: arguments that are compared after the call, in place of returned tensors. on_host: arguments that
    stay on the host. slopes: arguments whose gradients are compared.
    """

    names: tuple[str, ...]
    arguments: dict[str, Any]
    call: Callable
    expected: Callable | None
    compared: int
    written: tuple[str, ...]
    on_host: tuple[str, ...]
    slopes: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return the names of the operators."""
        return " + ".join(self.names)

    @property
    def shape(self) -> str:
        """Return the shapes of the first tensors."""
        return ", ".join(f"{name} {list(x.shape)}" for name, x in [*self.tensors()][:3])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the arguments that are tensors, or lists of them."""
        for name, value in self.arguments.items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, torch.Tensor):
                    yield name, each

    def results(self, call: Callable, arguments: dict[str, Any]) -> list[torch.Tensor]:
        """Return what is compared of one call: returned tensors, arguments that it writes, and gradients."""
        leaves = [arguments[name].requires_grad_() for name in self.slopes]
        returned = call(**arguments)
        returned = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        found = [x for x in returned[: self.compared] if isinstance(x, torch.Tensor)]
        if leaves:
            factors = torch.arange(found[0].numel(), device=found[0].device) % 7 - 3  # exact in bf16
            found += torch.autograd.grad(found[0], leaves, factors.view(found[0].shape).to(found[0].dtype))
        return [x.detach() for x in found] + [arguments[name] for name in self.written]


def check_operators(run: RunSpec, done: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return a row for each operator that the run's training and rollout call on one device, this process's own.

    done: (operators, shape) of rows of earlier calls, which are left out; those of this call are added. Packages of
    line pypi call no operator of a device. MC2 needs several ranks (`check_mc2`).
    """
    rows = []
    for case in operator_cases(run):
        if (case.title, case.shape) not in done:
            done.add((case.title, case.shape))
            rows.append(_compare(run, case))
    return rows


def check_mc2(run: RunSpec, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the row of MC2's dispatch and combine among the ranks of `group`, all of which make this call.

    group: ranks that exchange experts, on a communicator that nothing else uses, with HCCL_BUFFSIZE as the run has it.
    """
    return _compare(run, _mc2_case(run, _Maker(run), group))


def operator_cases(run: RunSpec) -> Iterator[OperatorCase]:
    """Yield the comparison of each operator that `check_operators` makes, with its inputs."""
    if run.line == A3 and run.as_npu:
        make = _Maker(run)
        yield from _training_cases(run, make)
        if run.samples:
            yield from _rollout_cases(run, make)


def _compare(run: RunSpec, case: OperatorCase) -> dict[str, Any]:
    """Return {operator, shape: of its tensors, tolerance, error, seconds, verdict}.

    error: the largest difference over the largest expected value, of all results and gradients; None where the operator
    did not run. seconds: of the second call, with gradients where they are compared. verdict: OK, WRONG, NOT_CHECKED,
    or `failed: ` with the error.
    """
    kinds = [x.dtype for _, x in case.tensors() if x.is_floating_point()]
    tolerance = max((TOLERANCES[kind] for kind in kinds), default=0.0)
    facts = {"operator": case.title, "shape": case.shape, "tolerance": tolerance}
    fp32 = tree_map_only(
        torch.Tensor, lambda x: x.to(torch.float32 if x.is_floating_point() else x.dtype, copy=True), case.arguments
    )
    references = case.expected or functools.partial(case.call, *(_REFERENCES.get(name) for name in case.names))
    expected = case.results(references, fp32)
    try:
        operators = [_find_operator(name) for name in case.names]
        call, device = functools.partial(case.call, *operators), torch.get_device_module("npu")
        found = case.results(call, _on_device(case))
        again = _on_device(case)
        device.synchronize()
        start = time.perf_counter()
        case.results(call, again)
        device.synchronize()
        seconds = time.perf_counter() - start
        error = max(_difference(x, y) for x, y in zip(found, expected, strict=True))
    except Exception as failure:  # a report names every operator, also those that a device refuses
        reason = str(failure).strip().partition("\n")[0]
        return {**facts, "error": None, "seconds": None, "verdict": f"failed: {type(failure).__name__}: {reason}"}
    own = any(str(getattr(inspect.unwrap(each), "__module__", "")).startswith("verl_patches.") for each in operators)
    verdict = (NOT_CHECKED if own else OK) if error <= tolerance else WRONG  # of NaN too
    return {**facts, "error": error, "seconds": seconds, "verdict": verdict}


def _find_operator(name: str) -> Callable:
    import torch_npu

    if name in _BUILDERS:
        module, builder = _BUILDERS[name]
        found = attrgetter(builder)(importlib.import_module(f"mindspeed.ops.{module}"))
        return getattr(found.load(), name)
    return getattr(torch_npu.atb if hasattr(torch_npu.atb, name) else torch_npu, name)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected value; of integers, the share that differs.

    Entries that are NaN in the reference are undefined on a device, and are not compared.
    """
    found = found.cpu()
    if found.shape != expected.shape:
        raise ValueError(f"expected a result of shape {list(expected.shape)}, found {list(found.shape)}")
    if not expected.is_floating_point():
        return float((found != expected).float().mean())
    defined = ~expected.isnan()
    apart = (found.to(expected.dtype) - expected)[defined].abs().nan_to_num(torch.inf)
    return float(apart.max() / expected[defined].abs().max())


def _on_device(case: OperatorCase) -> dict[str, Any]:
    moved = tree_map_only(torch.Tensor, lambda x: x.to("npu", copy=True), case.arguments)
    return moved | {name: case.arguments[name].clone() for name in case.on_host}


# -- the operators of a run, with its shapes ---------------------------------------------------------------------------


class _Maker:
    """Make random inputs on the host, the same in each process that makes the same ones."""

    def __init__(self, run: RunSpec):
        self.dtype, self.generator = getattr(torch, run.torch_dtype), torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normally distributed values in the run's dtype, or in `dtype`."""
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def angles(self, *shape: int) -> dict[str, torch.Tensor]:
        """Return {"cos": ..., "sin": ...} of random angles, equal in both halves of the last dimension."""
        half = torch.rand((*shape[:-1], shape[-1] // 2), generator=self.generator) * 6.28
        angle = torch.cat((half, half), -1)
        return {"cos": angle.cos().to(self.dtype), "sin": angle.sin().to(self.dtype)}

    def chosen(self, tokens: int, count: int, of: int) -> torch.Tensor:
        """Return `count` different experts of each token, int32 [tokens, count]."""
        return torch.rand(tokens, of, generator=self.generator).argsort(1)[:, :count].int().contiguous()

    def counts(self, groups: int, rows: int) -> torch.Tensor:
        """Return the sizes of uneven groups of `rows` rows, int64 [groups]."""
        return torch.randint(groups, (rows,), generator=self.generator).bincount(minlength=groups)


def _case(
    *names: str, call=_call, expected=None, compared=1, written=(), on_host=(), slopes=(), **arguments
) -> OperatorCase:
    return OperatorCase(names, arguments, call, expected, 0 if written else compared, written, on_host, slopes)


def _training_cases(run: RunSpec, make: _Maker) -> Iterator[OperatorCase]:
    """Yield the operators of MindSpeed's layers and optimizer, with their gradients, for one longest sequence of T."""
    model, layout, train, fp32 = run.model, run.train, run.recipe.train, torch.float32
    T, H, k, R = run.longest_tokens, model.hidden_size, model.num_experts_per_tok, model.qk_rope_head_dim
    N, D, F = model.num_attention_heads // layout.tp, model.qk_nope_head_dim + R, model.moe_intermediate_size
    norm = {"gamma": make(H), "epsilon": run.hf_config["rms_norm_eps"]}
    yield _case("npu_rms_norm", input=make(T, 1, H), **norm, slopes=("input", "gamma"))
    yield _case("npu_swiglu", input=make(T, 1, 2 * model.intermediate_size // layout.tp), dim=-1, slopes=("input",))
    if train.use_fused_rotary_pos_emb:
        rope = {"x": make(T, 1, N, R), **make.angles(T, 1, 1, R)}
        by_halves = functools.partial(layers.rotate, interleaved=False)
        yield _case("npu_rotary_position_embedding", call=_by_position, expected=by_halves, slopes=("x",), **rope)
    ends = [max(T // 3, 1), T]  # two packed sequences
    packed = {"input_layout": "TND", "actual_seq_qlen": ends, "actual_seq_kvlen": ends, "head_num": N, "keep_prob": 1.0}
    packed |= {"sparse_mode": 3, "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1), "scale": D**-0.5}
    packed |= dict.fromkeys(("pse", "padding_mask", "prefix"))
    heads = {"query": make(T, N, D), "key": make(T, N, D), "value": make(T, N, model.v_head_dim)}
    yield _case("npu_fusion_attention", **heads, **packed, slopes=tuple(heads))
    if train.use_fused_moe_token_permute_and_unpermute:
        chosen = make.chosen(T, k, model.n_routed_experts)
        tokens = {"tokens": make(T, H), "indices": chosen, "num_out_tokens": T * k, "padded_mode": False}
        yield _case("npu_moe_token_permute", **tokens, compared=2, slopes=("tokens",))
        rows = {"permuted_tokens": make(T * k, H), "probs": make(T, k), "padded_mode": False}
        rows["sorted_indices"] = chosen.flatten().argsort(stable=True).argsort().int()
        yield _case("npu_moe_token_unpermute", **rows, slopes=("permuted_tokens", "probs"))
    yield from _product_cases(run, make, T)
    state = [make(F, H, dtype=fp32), make(F, H, dtype=fp32), make(F, H, dtype=fp32).abs()]
    adam: dict[str, Any] = {"beta1_power": 0.9, "beta2_power": 0.999, "beta1": 0.9, "beta2": 0.999, "lr": 0.1}
    adam |= {"weight_decay": 0.01, "epsilon": 1e-8, "amsgrad": False, "maximize": False, "out": state}
    unlimited, step = functools.partial(_call, max_grad_norm=None), layers.npu_apply_adam_w
    yield _case("npu_apply_adam_w", call=unlimited, expected=step, compared=3, **adam, grad=make(F, H, dtype=fp32))


def _by_position(operator: Callable, **arguments: Any) -> Any:
    return operator(*arguments.values())


def _product_cases(run: RunSpec, make: _Maker, rows: int) -> Iterator[OperatorCase]:
    """Yield the products of `rows` rows with this rank's experts, and their gradients as the run accumulates them."""
    model, layout, train = run.model, run.train, run.recipe.train
    e, H = len(layout.local_experts(0, model.n_routed_experts)), model.hidden_size
    x, weight = make(rows, H), make(e, H, 2 * model.moe_intermediate_size // layout.etp)
    grad, ends = make(rows, weight.shape[-1]), make.counts(e, rows).cumsum(0)
    product, inputs = experts.grouped_matmul, {"x": x, "weight": weight, "ends": ends}
    yield _case(
        "npu_gmm",
        call=lambda op, x, weight, ends: op([x], [weight], [], ends, 0, 0),
        expected=lambda x, weight, ends: product(x, weight, ends, 0, 0),
        **inputs,
    )
    if not train.gemm_gradient_accumulation_fusion:
        yield _case(
            "npu_gmm_backward",
            call=lambda op, grad, x, weight, ends: [part[0] for part in op([grad], [x], [weight], ends, 0)[:2]],
            expected=lambda grad, x, weight, ends: (
                product(grad, weight.transpose(1, 2), ends, 0, 0),
                product(x.t(), grad, ends, 2, 0),
            ),
            compared=2,
            grad=grad,
            **inputs,
        )
    else:
        yield _case(
            "npu_gmm_backward_fusion",
            call=lambda op, grad, weight, ends: op([grad], [weight], ends, 0)[0],
            expected=lambda grad, weight, ends: product(grad, weight.transpose(1, 2), ends, 0, 0),
            grad=grad,
            weight=weight,
            ends=ends,
        )
        add = {"x": x, "weight": grad, "group_list": ends, "grad": make(*weight.shape, dtype=torch.float32)}
        yield _case(
            "npu_groupmatmul_add_fp32",
            expected=lambda x, weight, group_list, grad: grad.add_(product(x.t(), weight, group_list, 2, 0)),
            written=("grad",),
            **add,
        )
    if train.gradient_accumulation_fusion:
        add = {"x": grad, "weight": x, "C": make(grad.shape[1], H, dtype=torch.float32)}
        yield _case("npu_matmul_add_fp32", expected=lambda x, weight, C: C.add_(x.t() @ weight), written=("C",), **add)


def _rollout_cases(run: RunSpec, make: _Maker) -> Iterator[OperatorCase]:
    """Yield the operators of vllm-ascend's layers: of a prompt of T tokens, and of a decode batch of B sequences."""
    model, layout, rollout, hf = run.model, run.rollout, run.verl.actor_rollout_ref.rollout, run.hf_config
    B, T = run.max_num_seqs, min(run.verl.data.max_prompt_length, rollout.max_num_batched_tokens)
    H, E, k, eps = model.hidden_size, model.n_routed_experts, model.num_experts_per_tok, hf["rms_norm_eps"]
    F, e = model.moe_intermediate_size // layout.etp, len(layout.local_experts(0, E))
    yield _case("npu_add_rms_norm", x1=make(B, H), x2=make(B, H), gamma=make(H), epsilon=eps, compared=3)
    if E == 256:  # else vllm_ascend.ops.fused_moe.select_experts routes in plain torch
        routing = {"k": k, "k_group": hf["topk_group"], "group_count": hf["n_group"], "group_select_mode": 1}
        routing |= {"renorm": 0, "norm_type": 1, "out_flag": False, "routed_scaling_factor": 1.0, "eps": 1e-20}
        scores = {"x": make(B, E, dtype=torch.float32), "bias": make(E, dtype=torch.float32) / 10}
        yield _case("npu_moe_gating_top_k", call=_gate, **scores, **routing)
    groups = {"group_list": make.counts(e, B * k), "split_item": 2, "group_type": 0, "group_list_type": 1}
    yield _case("npu_grouped_matmul", x=[make(B * k, H)], weight=[make(e, 2 * F, H).transpose(1, 2)], **groups)
    chosen = make.chosen(T, k, E)
    numbers = torch.arange(T * k, dtype=torch.int32).view(k, T).T.contiguous()
    routed = {"x": make(T, H), "row_idx": numbers, "expert_idx": chosen, "active_num": T}
    yield _case("npu_moe_init_routing", **routed, compared=3)
    numbers = make.chosen(T, 1, e).flatten().sort().values
    yield _case("npu_moe_compute_expert_tokens", sorted_expert_for_source_row=numbers, num_expert=e)
    sums = {"expanded_permuted_rows": make(T * k, H), "scales": make(T, k), "export_for_source_row": chosen}
    sums |= {"expanded_src_to_dst_row": experts.npu_moe_init_routing(**routed)[1], "drop_pad_mode": 0}
    finalize = functools.partial(_call, skip1=None, skip2=None, bias=None)
    yield _case("npu_moe_finalize_routing", call=finalize, expected=experts.npu_moe_finalize_routing, **sums)
    yield from _prompt_cases(run, make, T)
    yield from _cache_cases(run, make, B)


def _gate(operator: Callable, x: torch.Tensor, **routing: Any) -> torch.Tensor:
    """Return the weight of each expert [T, E], in which the order of a token's experts does not count."""
    weights, chosen, _ = operator(x, **routing)
    return torch.zeros_like(x).scatter(1, chosen.long(), weights)


def _prompt_cases(run: RunSpec, make: _Maker, T: int) -> Iterator[OperatorCase]:
    """Yield the attention of prompts of T tokens; the ring also adds earlier tokens to what it has computed."""
    model, nope = run.model, run.model.qk_nope_head_dim
    N, D, Dv = model.num_attention_heads // run.rollout.tp, nope + model.qk_rope_head_dim, model.v_head_dim
    query, key, value = make(T, N, D), make(T, N, D), make(T, N, Dv)
    inputs = {"query": query, "key": key, "value": value, "mask": torch.ones(T, T).triu(1).to(make.dtype)}
    inputs |= {"seq_len": torch.tensor([T // 3, T - T // 3], dtype=torch.int32), "scale_value": D**-0.5}
    inputs |= {"num_heads": N, "num_kv_heads": N, "out": make(T, N, Dv)}
    yield _case("_npu_flash_attention", **inputs, written=("out",), on_host=("seq_len",))
    if not run.ascend.get("chunked_prefill_for_mla"):
        return
    inputs = {"q_nope": query[..., :nope], "q_rope": query[..., nope:], "k_nope": key[..., :nope], "value": value}
    inputs |= {"k_rope": key[..., nope:], "mask": torch.ones(512, 512).triu(1).to(make.dtype), "head_num": N}
    inputs |= {"kv_head_num": N, "qk_scale": D**-0.5, "kernel_type": "kernel_type_high_precision"}
    inputs |= {"input_layout": "type_bsnd", "output": make(T, N, Dv), "softmax_lse": make(N, T, dtype=torch.float32)}
    first = {"seqlen": torch.tensor([T], dtype=torch.int32), "pre_out": None, "prev_lse": None}
    first |= {"mask_type": "mask_type_triu", "calc_type": "calc_type_first_ring"}
    later = {"seqlen": torch.tensor([[T], [T]], dtype=torch.int32), "pre_out": make(T, N, Dv)}
    later |= {"prev_lse": make(N, T, dtype=torch.float32), "mask_type": "no_mask", "calc_type": "calc_type_default"}
    for ring in (first, later):
        written = ("output", "softmax_lse")
        yield _case("npu_ring_mla", **inputs, **ring, written=written, on_host=("seqlen",))


def _cache_cases(run: RunSpec, make: _Maker, B: int) -> Iterator[OperatorCase]:
    """Yield the operators that write and read the KV cache of B sequences, of 1 to S tokens, in decode."""
    L, R, S, N = run.model.kv_lora_rank, run.model.qk_rope_head_dim, run.longest_tokens, run.model.num_attention_heads
    N, each, scale = N // run.rollout.tp, -(-S // BLOCK), (run.model.qk_nope_head_dim + R) ** -0.5
    table = torch.randperm(B * each, generator=make.generator).int().view(B, each)
    lengths, angles = torch.linspace(1, S, B).int(), make.angles(B, 1, 1, R)
    latents, keys = make(B * each, BLOCK, 1, L), make(B * each, BLOCK, 1, R)
    slots = torch.randperm(B * each * BLOCK, generator=make.generator)[:B]
    caches = {"key_cache": latents, "value_cache": keys}
    new = {"key": make(B, 1, L), "value": make(B, 1, R), "slot_indices": slots.int()}
    yield _case("_npu_reshape_and_cache", **new, **caches, written=("key_cache", "value_cache"))
    if run.ascend.get("chunked_prefill_for_mla"):
        read = {"block_table": table, "context_lens": lengths, "seq_starts": torch.zeros_like(lengths), "cumsum": False}
        read |= {"key": make(int(lengths.sum()), 1, L), "value": make(int(lengths.sum()), 1, R)}
        yield _case("npu_paged_cache_load", **caches, **read, written=("key", "value"))
    # decode without a graph, as that of a rank whose peers take prompts
    rotary = {"positions": lengths.long() - 1, "query": make(B, N * R), "key": make(B, R), "head_size": R}
    rotary |= {"cos_sin_cache": make(S, R), "is_neox_style": False}
    yield _case("_npu_rotary_embedding", **rotary, written=("query", "key"))
    if run.recipe.rollout.ascend.mla_pa:
        read = {"q_nope": make(B, N, L), "q_rope": make(B, N, R), "ctkv": latents, "k_rope": keys, "kv_headnum": 1}
        read |= {"block_tables": table, "context_lens": lengths, "q_headnum": N, "qk_scale": scale}
        yield _case("npu_multi_head_latent_attention", **read, on_host=("context_lens",))
    else:
        read = {"query": make(B, N, L + R), "key_cache": torch.cat((latents, keys), -1), "num_kv_heads": 1}
        read |= {"num_heads": N, "scale_value": scale, "block_table": table, "context_lens": lengths}
        read |= {"mla_vheadsize": L, "out": make(B, N, L)}
        yield _case("_npu_paged_attention_mla", **read, written=("out",), on_host=("context_lens",))
    if not run.graphs:
        return
    yield _case("npu_interleave_rope", x=make(B, N, 1, R), **angles)
    norm = {"kv": make(B, 1, 1, L + R), "gamma": make(L), **angles, "index": slots, "k_cache": keys, "cache_mode": "PA"}
    norm |= {"ckv_cache": latents, "epsilon": run.hf_config["rms_norm_eps"], "is_output_kv": True}
    yield _case("npu_kv_rmsnorm_rope_cache", **norm, compared=4)
    read = {"query": make(B, N, 1, L), "query_rope": make(B, N, 1, R), "key": latents.view(-1, 1, BLOCK, L)}
    read |= {"key_rope": keys.view(-1, 1, BLOCK, R), "actual_seq_lengths_kv": lengths.tolist(), "block_table": table}
    read |= {"num_heads": N, "num_key_value_heads": 1, "scale": scale, "input_layout": "BNSD", "block_size": BLOCK}
    yield _case("npu_fused_infer_attention_score", call=_read_latents, **read)


def _read_latents(operator: Callable, key: torch.Tensor, **given: Any) -> Any:
    return operator(key=key, value=key, **given)  # one cache, of latents


def _mc2_case(run: RunSpec, make: _Maker, group: dist.ProcessGroup) -> OperatorCase:
    """Return the exchange of a decode batch: to each expert, which multiplies by a factor of its own, and back."""
    E, k = run.model.n_routed_experts, run.model.num_experts_per_tok
    B = -(-run.max_num_seqs // run.rollout.tp)  # tokens of a rank: HCCL_BUFFSIZE holds no more
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    make.generator.manual_seed(rank)  # each rank has tokens of its own
    same = {"group_ep": name, "ep_world_size": size, "ep_rank_id": rank, "moe_expert_num": E, "expert_shard_type": 0}
    same |= {"group_tp": name, "tp_world_size": 1, "tp_rank_id": 0, "shared_expert_rank_num": 0, "global_bs": B * size}

    def exchange(dispatch, combine, x, expert_ids, scales):
        rows, _, places, counts, received, of_tp = dispatch(x=x, expert_ids=expert_ids, **same)[:6]
        own = torch.arange(E, device=x.device)[rank * len(counts) :][: len(counts)].repeat_interleave(counts)
        rows[: len(own)] *= (1 + own / E).unsqueeze(1).to(x.dtype)
        sent = {"expand_idx": places, "ep_send_counts": received, "tp_send_counts": of_tp}
        return combine(expand_x=rows, expert_ids=expert_ids, expert_scales=scales, **sent, **same)

    def expected(x, expert_ids, scales):
        return experts.sum_over_experts(x, expert_ids, scales, lambda expert, row: row * (1 + expert / E))

    inputs = {"x": make(B, run.model.hidden_size), "expert_ids": make.chosen(B, k, E)}
    inputs["scales"] = torch.rand(B, k, generator=make.generator)
    names = "npu_moe_distribute_dispatch", "npu_moe_distribute_combine"
    return _case(*names, call=exchange, expected=expected, **inputs)
