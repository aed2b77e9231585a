"""Worker set-up hooks of the loop's tests: ranks that differ, spoilt weight syncs, memory that is not offloaded.

Used as recipe.worker_process_setup_hook=loop_hooks.NAME. Except for `other_switches` and `no_patches`, they replace no
symbol that our catalogue replaces.
"""

import functools
import gc
import importlib
import itertools
import os
import signal

from verl_patches.heartbeat import heartbeat
from verl_patches.patching import engine, fingerprint
from verl_patches.patching.hooks import after_import

ROLLOUT = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd"
MODELS = {  # vLLM's and vllm-ascend's, of which a process makes one
    "vllm.model_executor.models.deepseek_v2": "DeepseekV2ForCausalLM",
    "vllm_ascend.models.deepseek_v2": "CustomDeepseekV2ForCausalLM",
}
EXPERT = "model.layers.2.mlp.experts.{}.down_proj.weight"


def wrap(module, name, wrapper):
    """`wrapper(original, *args, **kwargs)` in place of "function" or "Class.method", once its module is imported."""

    def on_import(imported):
        owner, _, function = name.rpartition(".")
        owner = getattr(imported, owner) if owner else imported
        original = getattr(owner, function)
        setattr(owner, function, functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs)))

    after_import(module, on_import)


def after_init(module, cls, change):
    """`change(object)` at the end of __init__ of a class."""

    def __init__(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        change(self)

    wrap(module, f"{cls}.__init__", __init__)


def on_models(change):
    """`change(model)` for each model that vLLM makes."""
    for module, name in MODELS.items():
        after_init(module, name, change)


# -- ranks that differ in their patches, which is refused before step 1, or in their work ------------------------------


def other_switches():
    """Rank 1 runs with one row switched off."""
    if os.environ.get("RANK") == "1":
        from verl_patches.catalog import all_rows
        from verl_patches.patching.switches import parse

        text = engine.current().switches.text()
        engine.current().revert()
        engine.of_process.value = None
        engine.start(all_rows(), parse(f"{text},-reshard.direct")).apply()


def no_patches():
    """Rank 1 reverts one of our rows: its switches are unchanged, its code is not."""
    if os.environ.get("RANK") == "1":
        row = engine.current()._rows["update.skip_bad_steps"]
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
    reviewed_hash = fingerprint.reviewed_hash
    fingerprint.reviewed_hash = lambda line, place: "0" * 16 if place == target else reviewed_hash(line, place)


def stop_early():
    """One word in sixteen ends a sequence, so that sequences, and with them DP ranks, end at different steps."""
    after_init(ROLLOUT, "vLLMRollout", lambda self: setattr(self.sampling_params, "stop_token_ids", list(range(32))))


def end_early():
    """The same, and verl takes those words for ends: responses are unequally long, and log-probs can be compared."""
    stop_early()

    def mask_of(mask, response_id, eos_token, dtype):
        return mask(response_id, [eos_token, *range(32)], dtype)

    wrap(ROLLOUT, "get_response_mask", mask_of)


def print_bytes():
    """The trainer prints the bytes of the arrays that each stage of the tensor cache sends, once, and gets back."""

    def run(stage, original, self, sent):
        answers = original(self, sent)
        payloads = [part for part in (sent, *answers) if not isinstance(part, bool)]
        parts = [part if isinstance(part, dict) else vars(part) for part in payloads]
        sizes = [value.nbytes for part in parts for value in part.values() if hasattr(value, "nbytes")]
        print("bytes of stage", stage, sum(sizes))
        return answers

    for stage in ("generate", "place", "log_prob", "ref_log_prob", "update"):
        counted = functools.partial(run, stage)
        wrap("verl_patches.trainer.worker_group", f"WorkerCalls.{stage}_cached", counted)


# -- spoilt weight syncs: controls of the truth check ------------------------------------------------------------------


def _spoil_sync(change):
    """Each model that vLLM makes gets a load_weights of its own; the class keeps the one that a row may wrap."""

    def spoil(model):
        load = model.load_weights
        model.load_weights = lambda weights: load((name, change(name, tensor)) for name, tensor in weights)

    on_models(spoil)


def drop_bias():
    """No correction bias."""
    _spoil_sync(lambda name, t: t * 0 if "e_score_correction_bias" in name else t)


def spoil_nothing():
    """The control of the controls: the hook is there and changes nothing."""
    _spoil_sync(lambda name, t: t)


# -- ranks of vLLM that do not work together as they should ------------------------------------------------------------


def missing_all_reduce():
    """Output projections of one layer are not summed over vLLM's tensor-parallel ranks."""

    def forget(model):
        model.model.layers[3].self_attn.o_proj.reduce_results = False

    on_models(forget)


def wrong_dp_rank():
    """Each rank of two holds the experts of the other, as with the data-parallel ranks exchanged."""
    layer = "vllm.model_executor.layers.fused_moe.layer"
    wrap(layer, "determine_expert_map", lambda original, size, rank, experts: original(size, 1 - rank, experts))


# -- memory that the rollout's sleep does not free ---------------------------------------------------------------------


def sleep_frees_nothing():
    """The allocator of vLLM's sleep mode on rank 1 keeps all memory, as was found on several nodes."""
    if os.environ.get("RANK") == "1":
        after_import(
            "vllm_ascend.device_allocator.camem",
            lambda module: setattr(module, "python_unmap_and_release", lambda *handle: None),
        )


# -- requests that move between data-parallel ranks --------------------------------------------------------------------


def move_requests():
    """Each exchange moves the first request that can move to the next rank: of rank 0, then of rank 1, and so on.

    Ranks so have unequally many after every other exchange. Where that rank has none, as planned. The groups that the
    watch counts are printed.
    """
    exchanges = itertools.count()

    def to_the_next(plan, state, *args):
        from verl_patches.rollout.rebalance import MovePlan, RequestMove

        print("watch counts", sorted(heartbeat.here()._groups()))
        rank = next(exchanges) % len(state.lengths)
        movable = [at for at, tokens in enumerate(state.lengths[rank]) if tokens > 0]
        if not movable:
            return plan(state, *args)
        return MovePlan((RequestMove(rank, (rank + 1) % len(state.lengths), (movable[0],)),), 0, 0)

    wrap("verl_patches.rollout.rebalance_engine", "plan", to_the_next)


# -- spoilt destination maps: controls of the resharder's verification -------------------------------------------------


def swap_experts():
    """Two experts land in each other's place, right after vLLM's memory was learnt."""

    def learn_spoilt(learn, *args, **kwargs):
        destinations = learn(*args, **kwargs)
        names, tensors = [EXPERT.format(0), EXPERT.format(1)], destinations.tensors
        if all(name in tensors for name in names):
            places = [tensors[name][0].tensor for name in reversed(names)]
            for name, tensor in zip(names, places, strict=True):
                object.__setattr__(tensors[name][0], "tensor", tensor)
        return destinations

    wrap("verl_patches.reshard.weight_sync", "learn_destinations", learn_spoilt)


# -- memory that is on the device while vLLM generates -----------------------------------------------------------------


def keep_gradients():
    """Gradients get their memory again, zeroed, between the weight sync and the rollout; no row of ours is there."""

    def preprocess_data(original, self, data):
        for chunk in self.actor_module:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.untyped_storage().resize_(buffer.numel * buffer.grad_data.element_size())
                buffer.grad_data.zero_()
        return original(self, data)

    manager = "verl.workers.sharding_manager.megatron_vllm"
    wrap(manager, "MegatronVLLMShardingManager.preprocess_data", preprocess_data)


class LeftOnDeviceError(RuntimeError):
    """What was not offloaded, in bytes."""


def nothing_left():
    """Ends the run if, when vLLM is to generate, any storage below Megatron's DDP is not empty."""

    def look_first(rollout):
        generate = rollout.generate_sequences

        def generate_sequences(*args, **kwargs):
            _raise_if_left()
            return generate(*args, **kwargs)

        rollout.generate_sequences = generate_sequences

    after_init(ROLLOUT, "vLLMRollout", look_first)


def _raise_if_left():
    from megatron.core.distributed import DistributedDataParallel

    sizes = {}
    for chunk in [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]:
        for kind in ("buffers", "expert_parallel_buffers"):
            for buffer in getattr(chunk, kind):
                for data in ("param_data", "grad_data"):
                    left = getattr(buffer, data).untyped_storage().nbytes()
                    sizes[f"{kind}.{data}"] = sizes.get(f"{kind}.{data}", 0) + left
        sizes["parameters"] = sum(p.untyped_storage().nbytes() for p in chunk.parameters() if p.requires_grad)
    if len(sizes) != 5 or any(sizes.values()):
        raise LeftOnDeviceError(f"expected four kinds of buffers and parameters, all of 0 bytes, found {sizes}")


# -- workers that are killed or stopped, and run again from a checkpoint -----------------------------------------------


def killed_in_save():
    """In the second save, with half of the tensors written."""

    saves = []

    def write(write_rank, folder, rank, pieces, contents, state):
        saves.append(None)

        def killed(piece):
            if rank == 1 and len(saves) == 2 and piece is pieces[len(pieces) // 2]:
                os.kill(os.getpid(), signal.SIGKILL)
            return contents(piece)

        return write_rank(folder, rank, pieces, killed, state)

    wrap("verl_patches.weights.checkpoint_files", "write_rank", write)


def killed_in_update():
    """All ranks, in the second update of their processes; those that begin with that step make only one."""
    updates = []

    def update(update_policy, *args, **kwargs):
        updates.append(None)
        if len(updates) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return update_policy(*args, **kwargs)

    wrap("verl.workers.actor.megatron_actor", "MegatronPPOActor.update_policy", update)


def stopped_in_update():
    """By SIGSTOP in the second update of its process; a process that begins with that step makes only one.

    Continued for its stack, it stops again: else the step could end before the run does.
    """
    updates = []

    def update(update_policy, *args, **kwargs):
        updates.append(None)
        while len(updates) == 2 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return update_policy(*args, **kwargs)

    wrap("verl.workers.actor.megatron_actor", "MegatronPPOActor.update_policy", update)
