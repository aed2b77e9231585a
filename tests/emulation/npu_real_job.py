"""MindSpeed's own fused modules, forward and backward, on the reference ops, in a process of its own.

Which adaptor starts is the variable ADAPTOR: mindspeed or mindspeed_llm. Each check compares upstream's real module
with a formula in plain torch, and the ops that were called are counted. With SPOILT=1 every op gives something else, as
a control.
"""

import collections
import dataclasses
import functools
import importlib
import math
import os
import traceback
from types import SimpleNamespace

from verl_patches.emulation import rows as cpu_rows
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches

ADAPTOR, SPOILT = os.environ["ADAPTOR"], "SPOILT" in os.environ
ROWS = [dataclasses.replace(row, lines=frozenset({"a3"})) for row in cpu_rows.TORCH] + list(cpu_rows.NPU)
ENGINE = Engine(ROWS, Switches("a3", "cpu"))
ENGINE.apply()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

importlib.import_module(
    {"mindspeed": "mindspeed", "mindspeed_llm": "mindspeed_llm.tasks"}[ADAPTOR] + ".megatron_adaptor"
)
import torch_npu  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training import arguments, get_args, global_vars  # noqa: E402

from tests.ranks import init_group  # noqa: E402
from verl_patches.emulation.ascend import mindspeed_ops  # noqa: E402

CALLS = collections.Counter()
CHECKS = {}


def check(function, adaptor=ADAPTOR):
    """Decorator: one check of this job."""
    if adaptor == ADAPTOR:
        CHECKS[function.__name__] = function
    return function


def spoil(found, args, out):
    """Another result: in place where the op works in place."""
    if found is None or out:
        with torch.no_grad():
            for tensor in out or args:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor.add_(0.1)
        return found
    first, *rest = [found] if isinstance(found, torch.Tensor) else found
    changed = [first[0] * 1.1] if isinstance(first, list) else first * 1.1
    return changed if isinstance(found, torch.Tensor) else type(found)([changed, *rest])


def count_calls():
    def counted(holder, name, function):
        def call(*args, **kwargs):
            CALLS[name] += 1
            found = function(*args, **kwargs)
            return spoil(found, args, kwargs.get("out")) if SPOILT else found

        setattr(holder, name, call)

    for holder in (torch_npu, *{id(ops): ops for ops in mindspeed_ops.OPS.values()}.values()):
        for name, function in list(vars(holder).items()):
            if name.startswith("npu_"):
                counted(holder, name, function)


def start():
    """Megatron's arguments at their defaults, but for what the checks need."""
    init_group()
    args = arguments.parse_args()
    if ADAPTOR == "mindspeed_llm":
        from mindspeed_llm.training.arguments import _add_dummy_args

        _add_dummy_args(args)  # its validator calls this for what MindSpeed has and it has not
    args.use_flash_attn = args.use_fused_rmsnorm = args.use_fused_rotary_pos_emb = args.use_fused_swiglu = True
    args.num_layers, args.hidden_size, args.num_attention_heads, args.seq_length = 1, 12, 2, 5
    args.attention_mask_type, args.sparse_mode, args.pre_tockens, args.next_tockens = "causal", 2, 65536, 0
    args.position_embedding_type, args.virtual_pipeline_model_parallel_size = "rope", None
    global_vars.set_args(args)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def config(**more):
    sizes = {"num_layers": 1, "hidden_size": 12, "num_attention_heads": 2, "ffn_hidden_size": 6, "num_query_groups": 2}
    more |= {"use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return TransformerConfig(**sizes, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, **more)


def same(found, expected, leaves):
    """Values and gradients agree."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, leaves, grad, retain_graph=True) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


@check
def rms_norm():
    from megatron.legacy.model.rms_norm import RMSNorm

    norm, x = RMSNorm(12, eps=1e-3), leaf(3, 2, 12)
    norm.weight.data.uniform_()
    same(norm(x), F.rms_norm(x, (12,), norm.weight, 1e-3), (x, norm.weight))


@check
def swiglu():
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    x = leaf(4, 10)
    same(SwiGLUFunction.apply(x, False), F.silu(x[:, :5]) * x[:, 5:], (x,))


@check
def rotary():
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    x, freqs = leaf(5, 2, 3, 8), torch.rand(5, 1, 1, 3).repeat(1, 1, 1, 2) * 6
    turned = torch.cat((-x[..., 3:6], x[..., :3]), -1)
    expected = torch.cat((x[..., :6] * freqs.cos() + turned * freqs.sin(), x[..., 6:]), -1)
    same(rotary_pos_embedding.apply_rotary_pos_emb_bshd(x, freqs), expected, (x,))


@check
def grouped_experts():
    from megatron.core.transformer.moe.experts import GroupedMLP

    experts, counts, x = GroupedMLP(3, config(num_moe_experts=3)), [4, 0, 3], leaf(7, 12)
    assert (experts.weight1.shape, experts.weight2.shape) == ((12, 3 * 12), (3 * 6, 12))
    found, _ = experts(x, torch.tensor(counts))
    w1, w2 = experts.weight1.view(3, 12, 12), experts.weight2.view(3, 6, 12)
    inner = [rows @ w1[e] for e, rows in enumerate(x.split(counts))]
    expected = torch.cat([F.silu(h[:, :6]) * h[:, 6:] @ w2[e] for e, h in enumerate(inner)])
    same(found, expected, (x, experts.weight1, experts.weight2))
    get_args().gemm_gradient_accumulation_fusion = True  # gradients of weights go to main_grad
    try:
        for weight in (experts.weight1, experts.weight2):
            weight.main_grad = torch.zeros_like(weight)
        grad = torch.randn_like(expected)
        dx, d1, d2 = torch.autograd.grad(expected, (x, experts.weight1, experts.weight2), grad)
        experts(x, torch.tensor(counts))[0].backward(grad)
        torch.testing.assert_close((x.grad, experts.weight1.main_grad, experts.weight2.main_grad), (dx, d1, d2))
    finally:
        get_args().gemm_gradient_accumulation_fusion = False


@check
def gmm_by_counts():
    from mindspeed.ops.gmm import npu_gmm, npu_gmm_v2

    x, weight, counts = leaf(7, 4), leaf(3, 4, 5), torch.tensor([4, 0, 3])
    expected = torch.cat([rows @ weight[e] for e, rows in enumerate(x.split(counts.tolist()))])
    same(npu_gmm_v2(x, weight, group_list=counts, group_type=0), expected, (x, weight))
    same(npu_gmm(x, weight, group_list=counts.cumsum(0).tolist(), group_type=0), expected, (x, weight))


def causal(q, k, v):
    """[S, B, N, D] -> [S, B, N * D]."""
    parts = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=1 / math.sqrt(6))
    return out.permute(2, 0, 1, 3).flatten(2)


def attend(inputs, expected, packed=None):
    core = DotProductAttention(config(kv_channels=6), 1, AttnMaskType.causal, "self")
    mask = torch.ones(2048, 2048).triu(1).bool()
    found = core(*inputs, mask, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
    same(found, expected, inputs)


def packed_inputs():
    """Inputs of two sequences, of lengths 3 and 4, and their attention."""
    inputs = [leaf(7, 1, 2, 6) for _ in range(3)]
    return inputs, torch.cat([causal(*(x[part] for x in inputs)) for part in (slice(0, 3), slice(3, 7))])


@check
def attention():
    inputs = [leaf(5, 2, 2, 6) for _ in range(3)]
    attend(inputs, causal(*inputs))


@functools.partial(check, adaptor="mindspeed")
def attention_packed():
    ends = torch.tensor([0, 3, 7])
    attend(*packed_inputs(), SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_kv=ends))


@check
def token_permutation():
    from mindspeed.core.fusions.npu_moe_token_permute import permute_wrapper
    from mindspeed.core.fusions.npu_moe_token_unpermute import unpermute_wrapper

    indices = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
    x, probs = leaf(4, 12), torch.rand(4, 2, requires_grad=True)
    rows, places = permute_wrapper(None)(x, indices)
    plain, order = x[indices.flatten().argsort(stable=True) // 2], indices.flatten().argsort(stable=True)
    same(rows, plain, (x,))
    found = unpermute_wrapper(None)(rows * rows, places, probs)
    expected = torch.zeros(8, 12).index_copy(0, order, plain * plain).view(4, 2, 12).mul(probs[..., None]).sum(1)
    same(found, expected, (x, probs))


def optimize(make):
    torch.manual_seed(3)
    param = torch.nn.Parameter(torch.randn(6))
    optimizer = make([param], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    for _ in range(3):
        param.grad = torch.randn(6)
        optimizer.step()
    return param


@check
def fused_adamw():
    from apex.optimizers import FusedAdam

    assert FusedAdam.__module__.startswith("mindspeed"), FusedAdam.__module__  # what Megatron takes
    torch.testing.assert_close(optimize(FusedAdam), optimize(torch.optim.AdamW))


@check
def swap_adamw():
    """MindSpeed's swap optimizer step, with its own bookkeeping of what lies on the host."""
    from mindspeed.core.optimizer import swap_optimizer

    swap = swap_optimizer.SwapDistributedOptimizer
    swap.swap_to_device_stream, swap.swap_to_host_stream = torch.cuda.Stream(), torch.cuda.Stream()

    class Swapped(torch.optim.AdamW):
        def __init__(self, params, **defaults):
            super().__init__(params, **defaults)
            self.param_to_group_map, self.swap_numel = {params[0]: self.param_groups[0]}, 6
            self.kept = torch.zeros(6)
            swap.create_tensor_maps(params[0], self.kept)
            state, on_host = self.state[params[0]], swap.param_to_cpu_states_map[params[0]]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key], on_host[key] = torch.zeros(6), torch.empty_like(params[0], pin_memory=True, device="cpu")
            state["max_exp_avg_sq"] = None
            swap.param_to_device_states_map[params[0]] = state
            swap.swap_tensors_to_host(params[0])

        def step(self):
            param = self.param_groups[0]["params"][0]
            assert param.untyped_storage().size() == 0  # it is on the host
            with torch.no_grad():
                swap_optimizer.swap_adamw_step(self)
            param.kept = self.kept

    param = optimize(Swapped)
    torch.testing.assert_close(param.kept, optimize(torch.optim.AdamW).detach())


def main():
    """{"errors": {check: traceback or ""}, "calls": {check: {op: times}}, "states": {row id: state}}."""
    start()
    count_calls()
    errors, calls = {}, {}
    for name, function in CHECKS.items():
        CALLS.clear()
        torch.manual_seed(1)
        try:
            function()
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
        calls[name] = dict(CALLS)
    states = {row["id"]: row["state"] for row in ENGINE.status()}
    return {"errors": errors, "calls": calls, "states": states}
