"""Worker set-up hook that ends the run if any weight or gradient of the actor is on the device while vLLM generates."""

import functools
import gc

from verl_patches.patching.hooks import after_import


class LeftOnDeviceError(RuntimeError):
    """What was not offloaded, in bytes."""


def nothing_left():
    """Rank by rank, whenever vLLM is asked to generate: every storage below Megatron's DDP is empty."""

    def on_import(module):
        original = module.vLLMRollout.__init__

        @functools.wraps(original)
        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            generate = self.generate_sequences

            def looked_first(*args, **kwargs):
                _look()
                return generate(*args, **kwargs)

            self.generate_sequences = looked_first

        module.vLLMRollout.__init__ = __init__

    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout_spmd", on_import)


def _look():
    from megatron.core.distributed import DistributedDataParallel

    chunks = [found for found in gc.get_objects() if type(found) is DistributedDataParallel]
    sizes = {}
    for chunk in chunks:
        for kind in ("buffers", "expert_parallel_buffers"):
            for buffer in getattr(chunk, kind):
                for what in ("param_data", "grad_data"):
                    key = f"{kind}.{what}"
                    sizes[key] = sizes.get(key, 0) + getattr(buffer, what).untyped_storage().nbytes()
        sizes["parameters"] = sum(p.untyped_storage().nbytes() for p in chunk.parameters() if p.requires_grad)
    left = {key: size for key, size in sizes.items() if size}
    if len(sizes) != 5 or left:  # four kinds of buffers and the views into them: none of them may be missing
        raise LeftOnDeviceError(f"{len(chunks)} chunks, looked at {sorted(sizes)}, left on the device: {left}")
