"""Load Megatron's own checkpoint on a rank as Megatron does, and compare parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from verl.utils.megatron_utils import unwrap_model

from tests.model.megatron_model import build_model
from verl_patches.layout.parallel import parse_layout
from verl_patches.reshard.parameters import named_weights


def load_checkpoint_job(model: Path, config, folder: Path, args) -> list[str]:
    """Return parameters that core_r0.8.0's load_checkpoint reads from `folder` but that differ from the HF model's.

    It loads as with --load FOLDER --no-load-optim --no-load-rng, strict. The model holds NaN before.
    """
    from megatron.training import checkpointing

    expected, found = _build(model / "model", args, True), _build(model / "model", args, False)
    args.load, args.no_load_optim, args.no_load_rng = str(folder), True, True
    args.consumed_train_samples = args.consumed_valid_samples = 0
    iteration, _ = checkpointing.load_checkpoint(found, None, None, strict=True)
    assert iteration == 1
    return _unequal_parameters(found, expected)


def our_loader_job(model: Path, config, folder: Path, args) -> list[str]:
    """Return parameters that differ between our loader of the Megatron folder and that of the HF model."""
    from verl_patches.weights.load import load_weights

    expected, found = _build(model / "model", args, True), _build(model / "model", args, False)
    load_weights(folder, found, "a3", key="megatron folder")
    return _unequal_parameters(found, expected)


def _build(model: Path, args, load: bool):
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    chunks, _, _ = build_model(model, args.params_dtype, load=load, line="a3")
    return chunks if load else _fill_with_nan(chunks)


def _fill_with_nan(chunks):
    with torch.no_grad():
        for chunk in chunks:
            for _, tensor in named_weights(chunk):
                tensor.fill_(torch.nan)
    return chunks


def _unequal_parameters(found, expected) -> list[str]:
    pairs = zip(unwrap_model(found), unwrap_model(expected), strict=True)
    tensors = [(dict(named_weights(a)), dict(named_weights(b))) for a, b in pairs]
    assert all(a.keys() == b.keys() and a for a, b in tensors)
    return [name for a, b in tensors for name in a if not torch.equal(a[name], b[name])]


def load_state_dict_job(model: Path, folders: dict[str, Path]) -> dict[str, list[str]]:
    """Return {layout: parameters that differ after load_state_dict(strict=True) of this rank's file}, on line pypi."""
    from tests.model.megatron_model import start_parallel
    from verl_patches.weights.megatron import ITERATION_FOLDER, ranks_by_file

    found = {}
    for text, folder in folders.items():
        layout, rank = parse_layout(text), torch.distributed.get_rank()
        start_parallel(layout)
        expected, _, _ = build_model(model)
        chunks = _fill_with_nan(build_model(model, load=False)[0])
        name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}" if layout.pp > 1 else ""
        name += f"_{mpu.get_expert_model_parallel_rank():03d}" if layout.ep > 1 else ""
        (path,) = [path for path in ranks_by_file(layout, "megatron-local") if path.startswith(f"{name}/")]
        state = torch.load(folder / ITERATION_FOLDER / path, weights_only=True)
        assert (state["checkpoint_version"], state["iteration"]) == (3.0, 1)
        for number, chunk in enumerate(unwrap_model(chunks)):
            chunk.load_state_dict(state["model" if layout.vpp == 1 else f"model{number}"], strict=True)
        found[text] = [f"{rank} {name}" for name in _unequal_parameters(chunks, expected)]
    return found
