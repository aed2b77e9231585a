"""Count on a rank the bytes that a layer keeps for its backward pass, for test_activations.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

# Which inputs i and outputs o an op keeps on a device: after torch_npu's derivatives and mindspeed/ops/csrc/cann.
TORCH_NPU = {
    "npu_rms_norm": lambda i, o: (i[0], i[1], o[1]),
    "npu_swiglu": lambda i, o: (i[0],),
    "npu_fusion_attention": lambda i, o: (*i[:3], *o[:3]),
}
BUILDERS = {
    "npu_moe_token_permute": lambda i, o: (o[1],),
    "npu_moe_token_unpermute": lambda i, o: i,
    "npu_rotary_position_embedding": lambda i, o: (i[1], i[2]),
}


class SavedTensors:
    """Count bytes that autograd saves in counted functions: each storage once, without `weights` and earlier ones."""

    def __init__(self, weights):
        self._seen = {tensor.untyped_storage()._cdata: tensor for tensor in weights}
        self.size_bytes: dict[int, int] = {}

    def counting(self, name, function):
        def counted(*args, **kwargs):
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return function(*args, **kwargs)

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = tensor  # kept alive, so that no later storage has its address
                self.size_bytes[name] = self.size_bytes.get(name, 0) + storage.nbytes()
            return tensor

        return counted


class _Opaque(torch.autograd.Function):
    """Run an op forward by its reference, but save only the tensors that its backward op takes on a device."""

    @staticmethod
    def forward(ctx, call, saves, *tensors):
        out = call(*tensors)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        # a device writes contiguous outputs
        outs = [value.contiguous() if torch.is_tensor(value) else value for value in outs]
        ctx.save_for_backward(*saves(tensors, outs))
        return tuple(outs) if len(outs) > 1 else outs[0]


def opaque(function, saves):
    """Return `function`, whose leading tensors are differentiable, so that it saves saves(tensors, outputs)."""

    def call(*args, **kwargs):
        count = next((i for i, value in enumerate(args) if not torch.is_tensor(value)), len(args))
        rest = args[count:]
        return _Opaque.apply(lambda *tensors: function(*tensors, *rest, **kwargs), saves, *args[:count])

    return call


def in_bnsd(function):
    """Run the attention op in layout BNSD by the reference's SBH; it saves tensors in BNSD."""

    def call(query, key, value, heads, layout, **options):
        mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        options |= {"atten_mask": mask, "sparse_mode": 3}  # the reference's mask; attention is the same
        flat = [tensor.permute(2, 0, 1, 3).flatten(2) for tensor in (query, key, value)]
        out, *statistics = function(*flat, heads, "SBH", **options)
        return out.unflatten(2, (heads, -1)).permute(1, 2, 0, 3), *statistics

    return call


def saved_by_layers(model: Path, tokens: list[int], published: bool, args) -> dict[int, dict[int, int]]:
    """Return {tokens: {layer: bytes}} of forward passes of one sequence through MindSpeed-LLM's layers on this rank.

    The sequence is packed; or, with `published`, as in the public recipe: MindSpeed-LLM's own attention in layout BNSD,
    and a mask of all pairs of tokens, which all layers share and which is not counted.
    """
    import torch_npu
    from megatron.core import tensor_parallel
    from transformers import AutoConfig
    from verl.models.mcore import get_mcore_forward_fn, hf_to_mcore_config, init_mcore_model
    from verl.utils.megatron_utils import get_model, unwrap_model

    from verl_patches.emulation.ascend.mindspeed_ops import OPS

    if published:
        from mindspeed_llm.tasks.models.spec.deepseek_spec import layer_spec

        from verl_patches.model.mindspeed import model as ours

        args.shape_order, args.sparse_mode = "BNSD", 0
        torch_npu.npu_fusion_attention = in_bnsd(torch_npu.npu_fusion_attention)
        ours.CausalMlaAttention = layer_spec.submodules.self_attention.submodules.core_attention
    for name, saves in TORCH_NPU.items():
        setattr(torch_npu, name, opaque(getattr(torch_npu, name), saves))
    for name, saves in BUILDERS.items():
        setattr(OPS[name], name, opaque(getattr(OPS[name], name), saves))
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    hf_config = AutoConfig.from_pretrained(model)
    config = hf_to_mcore_config(hf_config, args.params_dtype)
    forward, found = get_mcore_forward_fn(hf_config), {}

    def provide(pre_process, post_process):
        return init_mcore_model(config, hf_config, pre_process, post_process)

    for count in tokens:
        chunks = get_model(provide, wrap_with_ddp=False)
        (made,) = unwrap_model(chunks)
        pairs = torch.ones(count, count, dtype=torch.bool).triu(1)[None, None]
        kept = SavedTensors([*made.parameters(), *made.buffers(), pairs])
        for index, layer in enumerate(made.decoder.layers):
            layer.forward = kept.counting(index, layer.forward)
        ids = torch.randint(6, 500, (1, count), generator=torch.Generator().manual_seed(0))
        mask, positions = torch.ones(1, count, dtype=torch.bool), torch.arange(count)[None]
        if published:
            chunks[0](input_ids=ids, position_ids=positions, attention_mask=pairs)
        else:
            forward(chunks[0], ids, mask, positions, sequence_parallel=config.sequence_parallel)
        found[count] = kept.size_bytes
    return found
