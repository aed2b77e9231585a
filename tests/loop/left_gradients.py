"""Worker set-up hook under which the actor's gradients are on the device while vLLM generates."""

import functools

from verl_patches.patching.hooks import after_import


def keep():
    """They get their memory again, zeroed, between the weight sync and the rollout; no row of ours is there."""

    def on_import(module):
        manager = module.MegatronVLLMShardingManager
        original = manager.preprocess_data

        @functools.wraps(original)
        def preprocess_data(self, data):
            for chunk in self.actor_module:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    buffer.grad_data.untyped_storage().resize_(buffer.numel * buffer.grad_data.element_size())
                    buffer.grad_data.zero_()
            return original(self, data)

        manager.preprocess_data = preprocess_data

    after_import("verl.workers.sharding_manager.megatron_vllm", on_import)
