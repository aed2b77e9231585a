"""Run vLLM 0.9.1 on a CPU: its platform, the few compiled kernels without a Python version, and its routed experts.

The platform is a subclass of vLLM's own CpuPlatform. It is installed through `vllm.platforms.builtin_platform_plugins`,
the registry in which vLLM looks for platforms, so that worker class, communicator and config checks all follow from it.
The worker is in a module of its own (vllm_worker.py): importing vLLM's workers needs the platform.

Unlike a kernel library's, these kernels have no blocking and no vector code; everything is computed in fp32 and rounded
once at the end. vLLM's own Python versions (`CustomOp.forward_native`) are used wherever they exist. Experts on CPU go
through intel_extension_for_pytorch upstream, which takes no expert map and so cannot do expert parallelism; here vLLM's
own `FusedMoE.select_experts` routes and `fused_experts` computes.

Letters of shapes: T tokens, B sequences, N heads, L kv_lora_rank, R rope width, D head width, H hidden, F expert
intermediate, e local experts, K experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.platforms.cpu import CpuPlatform

_WORKER_MODULE = "verl_patches.emulation.cpu.vllm_worker"
_WORKER_CLASSES = {"vllm.worker.cpu_worker.CPUWorker": f"{_WORKER_MODULE}.RolloutCpuWorker"}


class RolloutCpuPlatform(CpuPlatform):
    """Adapt vLLM's CpuPlatform to the external launcher; it needs no compiled operation."""

    simple_compile_backend: str = "eager"  # upstream: "inductor", which starts a C++ compiler for each function

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the class name of CpuCommunicator with token exchange between DP ranks that share experts."""
        return f"{_WORKER_MODULE}.RolloutCpuCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        """Run CpuPlatform's checks, keep the external launcher, and set what MLA and missing kernels need.

        - external_launcher stays (CpuPlatform turns it into "mp" when tp > 1).
        - Operations with a Python version use it (`custom_ops=["none"]`): the wheel's compiled ones do not load.
        - MLA: prefix caching off. CpuPlatform says so in its log but only turns chunked prefill off, and
          vllm.attention.backends.cpu_mla.CPUMLAMetadataBuilder refuses either. verl always enables prefix caching
          (verl.workers.rollout.vllm_rollout.vllm_rollout_spmd.vLLMRollout.__init__).
        """
        parallel = vllm_config.parallel_config
        backend = parallel.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        if backend == "external_launcher":
            parallel.distributed_executor_backend = backend
        parallel.worker_cls = _WORKER_CLASSES.get(parallel.worker_cls, parallel.worker_cls)
        vllm_config.compilation_config.custom_ops = ["none"]
        if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
            vllm_config.cache_config.enable_prefix_caching = False


def init_without_kernel(self: torch.nn.Module) -> None:
    """Replace SiluAndMul.__init__ without the look-up of a compiled op, which `forward_native` never uses."""
    from vllm.model_executor.custom_op import CustomOp

    CustomOp.__init__(self)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Write each token's latent and rotary key into its slot of the paged cache, in place.

    kv_c [T, L], k_pe [T, R], kv_cache [blocks, block_size, L + R], slot_mapping [<= T] int64, -1 for tokens that have
    no slot. As in the kernel, only the first len(slot_mapping) tokens are written: a dummy batch maps none. fp8 caches
    are refused.
    """
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise NotImplementedError(f"MLA cache on CPU: kv_cache_dtype {kv_cache_dtype!r} is not supported; use 'auto'")
    slots = slot_mapping.flatten()
    written = slots >= 0
    rows = torch.cat([kv_c, k_pe.reshape(kv_c.shape[0], -1)], dim=-1)[: slots.shape[0]]
    kv_cache.view(-1, kv_cache.shape[-1])[slots[written]] = rows[written].to(kv_cache.dtype)


def mla_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Attend with one query token a sequence to its cached latents (absorbed MLA: keys and values are the same rows).

    Fills out [B, N, L]; query [B, N, L + R], kv_cache [blocks, block_size, L + R], block_tables [B, blocks a sequence]
    int32, seq_lens [B] int32 (the new token included).
    """
    lens = seq_lens.long()
    block_size = kv_cache.shape[1]
    blocks = -(-int(lens.max()) // block_size)
    rows = kv_cache[block_tables[:, :blocks].long()].flatten(1, 2).float()
    unused = torch.arange(rows.shape[1]) >= lens[:, None]
    rows = rows.masked_fill(unused[..., None], 0.0)  # unwritten slots may hold NaN, and 0 * NaN is NaN
    scores = torch.einsum("bnd,bsd->bns", query.float(), rows) * scale
    weights = scores.masked_fill(unused[:, None], float("-inf")).softmax(dim=-1)
    out.copy_(torch.einsum("bns,bsl->bnl", weights, rows[..., : out.shape[-1]]))


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    seqlen_q: torch.Tensor,
    seqlen_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    pdropout: float = 0.0,
    softmax_scale: float = 1.0,
    zero_tensors: bool = False,
    is_causal: bool = True,
    return_softmax: bool = False,
    gen_: torch.Generator | None = None,
    window_size_left: float = -1,
    window_size_right: float = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    """Write attention over packed sequences into `out`; arguments as vLLM's `ipex_ops.varlen_attention`.

    query, key, value, out [T, N, D]; seqlen_q, seqlen_k [B + 1] are the starts of the sequences (cumulative lengths).
    Raises NotImplementedError for dropout, windows, alibi and soft caps, which MLA does not use.
    """
    if alibi_slopes is not None or pdropout or logits_soft_cap or window_size_left >= 0 or window_size_right >= 0:
        raise NotImplementedError("varlen_attention on CPU does not support alibi, dropout, windows or logits_soft_cap")
    starts_q, starts_k = seqlen_q.tolist(), seqlen_k.tolist()
    for i in range(len(starts_q) - 1):
        here, there = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        q, k, v = (x.transpose(0, 1)[None].float() for x in (query[here], key[there], value[there]))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=softmax_scale)
        out[here] = found[0].transpose(0, 1).to(out.dtype)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    **unused: Any,
) -> torch.Tensor:
    """Sum weight * down(silu(gate(x)) * up(x)) over each token's chosen experts; experts of other ranks add nothing.

    hidden_states [T, H]; w1 [e, 2F, H], gate above up; w2 [e, H, F]; topk_weights, topk_ids [T, K]; expert_map
    [global_num_experts] gives the local index or -1. Returns [T, H] in hidden_states' dtype, summed in fp32.
    Follows vLLM's Triton `fused_experts`. Raises NotImplementedError for other activations.
    """
    if activation != "silu" or apply_router_weight_on_input:
        found = f"{activation!r}, apply_router_weight_on_input={apply_router_weight_on_input}"
        raise NotImplementedError(f"fused_experts on CPU: expected 'silu', router weights on the output, found {found}")
    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        down = F.linear(F.silu(gate) * up, w2[expert])
        out.index_add_(0, token, down.float() * topk_weights[token, choice, None].float())
    return out.to(hidden_states.dtype)


def keep_expert_weights(self: object, layer: torch.nn.Module) -> None:
    """Replace UnquantizedFusedMoEMethod.process_weights_after_loading: keep weights as loaded, not packed for ipex."""
