"""Worker set-up hooks that change what the resharder learns: the controls of its own proof, and of its way around.

Used as recipe.worker_process_setup_hook=spoilt_reshard.NAME; they change no symbol that our catalogue replaces.
"""

from verl_patches.patching.hooks import after_import

O_PROJ = "model.layers.3.self_attn.o_proj.weight"
EXPERT = "model.layers.2.mlp.experts.{}.down_proj.weight"


def _on_learnt(change):
    """`change(found)`: edit what is learnt of vLLM's memory (destination.Destinations) right after it was learnt."""

    def on_import(module):
        learn = module.learn_destinations

        def learn_spoilt(*args, **kwargs):
            found = learn(*args, **kwargs)
            change(found)
            return found

        module.learn_destinations = learn_spoilt

    after_import("verl_patches.reshard.weight_sync", on_import)


def swap_experts():
    """Two experts land in each other's place."""

    def change(found):
        tensors = found.tensors
        one, other = EXPERT.format(0), EXPERT.format(1)
        if one in tensors and other in tensors:
            places = tensors[one][0].tensor, tensors[other][0].tensor
            for name, tensor in zip((one, other), reversed(places), strict=True):
                object.__setattr__(tensors[name][0], "tensor", tensor)

    _on_learnt(change)


def unmap_o_proj():
    """Rank 1 cannot follow the last layer's o_proj: as destination.py has it, so that load_weights must load it."""

    def change(found):
        from verl_patches.reshard.trace import Opaque  # not before: torch

        if found.rank == 1:
            found.unmapped[O_PROJ] = "spoilt"
            unmapped = [Opaque(O_PROJ, "spoilt", place.tensor) for place in found.tensors.pop(O_PROJ)]
            object.__setattr__(found, "opaque", (*found.opaque, *unmapped))

    _on_learnt(change)
