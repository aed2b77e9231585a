"""CPU stand-ins inside MindSpeed (line a3). No torch here."""

from __future__ import annotations

from verl_patches.patching.spec import PatchSpec

ROWS: tuple[PatchSpec, ...] = (
    PatchSpec(
        id="platform.mindspeed_tensor_type", stage="platform", target="mindspeed.megatron_adaptor:type_wrapper",
        kind="wrap", provider="verl_patches.platform.cpu.mindspeed_names:type_as_on_a_device",
        why="Megatron's optimizers take torch.cuda.FloatTensor and the like only "
            "(megatron/core/optimizer/distrib_optimizer.py:347); MindSpeed goes over Tensor.type itself",
        exit="megatron-core asks its tensors for their device", lines=frozenset({"a3"}), platforms=frozenset({"cpu"}),
        processes=frozenset({"worker"}),
    ),
)  # fmt: skip
