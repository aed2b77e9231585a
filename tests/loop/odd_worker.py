"""Worker set-up hooks that make ranks differ: in their patches, which is refused before step 1, or in their work."""

import functools
import importlib
import os
import time
from pathlib import Path

from verl_patches.patching import engine, fingerprint
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
    """Rank 1 takes one of our rows out again: what it means is unchanged, what it does is not."""
    if os.environ.get("RANK") == "1":
        row = engine.current()._rows["update.micro_batches_as_planned"]
        row.state, row.hook = "reverted", None


def drifted_in_workers():
    """A row's target is not the reviewed one, in training workers only; the row fails when they load their class."""
    if "WG_PREFIX" in os.environ:
        _let_drift("verl.workers.megatron_workers:ActorRolloutRefWorker._build_model_optimizer")


def drifted_in_the_hook():
    """The same in the controller and at once, while Ray's set-up hook runs."""
    if "WG_PREFIX" not in os.environ:
        _let_drift("verl.utils.tracking:Tracking.log")
        importlib.import_module("verl.utils.tracking")


def _let_drift(target):
    """`target` drifts in this process; when its row was refused goes to the file that FAILED_AT names."""
    reviewed_hash, refusal = fingerprint.reviewed_hash, engine.refusal

    def noted(*args):
        Path(os.environ["FAILED_AT"]).write_text(str(time.time()))
        return refusal(*args)

    fingerprint.reviewed_hash = lambda line, place: "0" * 16 if place == target else reviewed_hash(line, place)
    engine.refusal = noted


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
