"""Worker set-up hooks that spoil the resharder: the controls of its own proof.

Used as recipe.worker_process_setup_hook=spoilt_reshard.NAME; they change no symbol that our catalogue replaces.
"""

from verl_patches.patching.hooks import after_import

EXPERT = "model.layers.2.mlp.experts.{}.down_proj.weight"


def _on_learnt(change):
    """`change(tensors)`: edit what is learnt of vLLM's memory, {HF name: places}, right after it was learnt."""

    def on_import(module):
        learn = module.learn_destinations

        def learn_spoilt(*args, **kwargs):
            found = learn(*args, **kwargs)
            change(found.tensors)
            return found

        module.learn_destinations = learn_spoilt

    after_import("verl_patches.reshard.in_loop", on_import)


def swap_experts():
    """Two experts land in each other's place."""

    def change(tensors):
        one, other = EXPERT.format(0), EXPERT.format(1)
        if one in tensors and other in tensors:
            places = tensors[one][0].tensor, tensors[other][0].tensor
            for name, tensor in zip((one, other), reversed(places), strict=True):
                object.__setattr__(tensors[name][0], "tensor", tensor)

    _on_learnt(change)


def forget_an_expert():
    """One expert's place is not known."""
    _on_learnt(lambda tensors: tensors.pop(EXPERT.format(0), None))


def write_half():
    """What arrives of the last layer's o_proj is not written: its place is a copy."""

    def change(tensors):
        for place in tensors["model.layers.3.self_attn.o_proj.weight"]:
            object.__setattr__(place, "tensor", place.tensor.clone())

    _on_learnt(change)
