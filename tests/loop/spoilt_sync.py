"""Worker set-up hooks that spoil what vLLM is given at every weight sync: the controls of the truth check.

Used as recipe.worker_process_setup_hook=spoilt_sync.NAME; they change no symbol that our catalogue replaces.
"""

import functools

from verl_patches.patching.hooks import after_import


def _spoil(change):
    """Each model that vLLM makes gets a load_weights of its own; the class keeps the one that a row may wrap."""

    def on_import(module):
        cls = module.DeepseekV2ForCausalLM
        original = cls.__init__

        @functools.wraps(original)
        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            load = self.load_weights
            self.load_weights = lambda weights: load(new for name, tensor in weights for new in change(name, tensor))

        cls.__init__ = __init__

    after_import("vllm.model_executor.models.deepseek_v2", on_import)


def corrupt_expert():
    """One expert's down projection, rows rolled by one."""
    _spoil(lambda n, t: [(n, t.roll(1, 0) if n.endswith("layers.1.mlp.experts.0.down_proj.weight") else t)])


def drop_bias():
    """No correction bias."""
    _spoil(lambda n, t: [(n, t * 0 if "e_score_correction_bias" in n else t)])


def nothing():
    """The control of the controls: the hook is there and changes nothing."""
    _spoil(lambda n, t: [(n, t)])
