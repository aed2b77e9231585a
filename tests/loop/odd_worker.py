"""Worker set-up hooks that make ranks differ: in their patches, which is refused before step 1, or in their work."""

import functools
import os

from verl_patches.patching import engine
from verl_patches.patching.hooks import after_import


def other_switches():
    """Rank 1 runs with one row switched off."""
    if os.environ.get("RANK") == "1":
        from verl_patches.catalog import ROWS
        from verl_patches.patching.switches import parse

        text = engine.current().switches.text()
        engine.current().revert()
        engine._CURRENT = None
        engine.start(ROWS, parse(f"{text},-reshard.direct")).apply()


def no_patches():
    """Rank 1 takes our weight-sync row out again: what it means is unchanged, what it does is not."""
    if os.environ.get("RANK") == "1":
        row = engine.current()._rows["update.sync_switch"]
        row.state, row.hook = "reverted", None


def no_prelude():
    """Rank 1 has nobody who proves, as where the prelude has not run. What a CPU cannot do without stays patched."""
    if os.environ.get("RANK") == "1":
        from verl_patches.catalog import ROWS
        from verl_patches.patching.switches import parse

        text = engine.current().switches.text()
        engine.current().revert()
        engine._CURRENT = engine.Engine(ROWS, parse(f"{text},-update.prove_patches"))
        engine._CURRENT.apply()


def stop_early():
    """One word in sixteen ends a sequence, so that sequences, and with them DP ranks, end at different steps."""
    _stop_at(list(range(32)))


def end_early():
    """The same, and verl takes those words for ends: responses are unequally long, and log-probs can be compared."""

    def mask(original):
        return lambda response_id, eos_token, dtype: original(response_id, [eos_token, *range(32)], dtype)

    _stop_at(list(range(32)), mask)


def _stop_at(words, mask=None):
    def on_import(module):
        original = module.vLLMRollout.__init__

        @functools.wraps(original)
        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.sampling_params.stop_token_ids = words

        if mask is not None:
            module.get_response_mask = mask(module.get_response_mask)

        module.vLLMRollout.__init__ = __init__

    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout_spmd", on_import)
