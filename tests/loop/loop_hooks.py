"""Define worker set-up hooks that break runs: ranks that differ, wrong weight syncs, memory that is not offloaded.

Tests use them as recipe.worker_process_setup_hook=loop_hooks.NAME. Except for `other_switches` and `no_patches`, they
replace no symbol that our patch table replaces.
"""

import functools
import gc
import importlib
import os
import signal
import time

from verl_patches.heartbeat import heartbeat
from verl_patches.patching import engine, fingerprint
from verl_patches.patching.hooks import after_import

ROLLOUT = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd"
MODELS = {  # models of vLLM and vllm-ascend; a process makes one of them
    "vllm.model_executor.models.deepseek_v2": "DeepseekV2ForCausalLM",
    "vllm_ascend.models.deepseek_v2": "CustomDeepseekV2ForCausalLM",
}
EXPERT = "model.layers.2.mlp.experts.{}.down_proj.weight"


def wrap(module, name, wrapper):
    """Replace "function" or "Class.method" by wrapper(original, *args, **kwargs) once its module is imported."""

    def on_import(imported):
        owner, _, function = name.rpartition(".")
        owner = getattr(imported, owner) if owner else imported
        original = getattr(owner, function)
        setattr(owner, function, functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs)))

    after_import(module, on_import)


def after_init(module, cls, change):
    """Call change(object) at the end of __init__ of a class."""

    def __init__(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        change(self)

    wrap(module, f"{cls}.__init__", __init__)


def on_models(change):
    """Call change(model) for each model that vLLM makes."""
    for module, name in MODELS.items():
        after_init(module, name, change)


# -- ranks that differ in their patches, which is refused before step 1, or in their work ------------------------------


def other_switches():
    """Switch one patch off on rank 1."""
    if os.environ.get("RANK") == "1":
        from verl_patches.catalog import all_rows
        from verl_patches.patching.switches import parse_switches

        text = engine.current_engine().switches.text()
        engine.current_engine().revert()
        engine.process_engine.value = None
        engine.start_engine(all_rows(), parse_switches(f"{text},-reshard.direct")).apply()


def no_patches():
    """Revert one patch on rank 1: its switches stay the same, its code does not."""
    if os.environ.get("RANK") == "1":
        row = engine.current_engine()._rows["update.skip_bad_steps"]
        row.state, row.hook = "reverted", None


def drifted_in_workers():
    """Make a patch's target differ from the reviewed code in training workers, where the patch fails at import."""
    if "WG_PREFIX" in os.environ:
        _let_drift("verl.workers.megatron_workers:ActorRolloutRefWorker._build_model_optimizer")


def drifted_in_the_hook():
    """Make a patch's target differ from the reviewed code in the controller, at once, while Ray's hook runs."""
    if "WG_PREFIX" not in os.environ:
        _let_drift("verl.utils.tracking:Tracking.log")
        importlib.import_module("verl.utils.tracking")


def _let_drift(target):
    reviewed_hash = fingerprint.reviewed_hash
    fingerprint.reviewed_hash = lambda line, place: "0" * 16 if place == target else reviewed_hash(line, place)


def stop_early():
    """Let one token in sixteen end a sequence, so that sequences and DP ranks end at different steps."""
    after_init(ROLLOUT, "vLLMRollout", lambda self: setattr(self.sampling_params, "stop_token_ids", list(range(32))))


def end_early():
    """Stop early and let verl treat those tokens as ends: responses differ in length, log-probs can be compared."""
    stop_early()

    def mask_with_ends(mask, response_id, eos_token, dtype):
        return mask(response_id, [eos_token, *range(32)], dtype)

    wrap(ROLLOUT, "get_response_mask", mask_with_ends)


def print_bytes():
    """Let the trainer print the bytes of the arrays that each stage of the tensor cache sends and receives."""

    def run(stage, original, sent):
        answers = original(sent)
        payloads = [part for part in (sent, *answers) if not isinstance(part, bool | None)]
        parts = [part if isinstance(part, dict) else vars(part) for part in payloads]
        sizes = [value.nbytes for part in parts for value in part.values() if hasattr(value, "nbytes")]
        print("bytes of stage", stage, sum(sizes))
        return answers

    def count(self):
        for stage in ("generate", "place", "log_prob", "ref_log_prob", "update"):
            name = f"{stage}_cached"
            setattr(self._group, name, functools.partial(run, stage, getattr(self._group, name)))

    after_init("verl_patches.trainer.worker_group", "RecipeWorkerGroup", count)


# -- spoilt weight syncs: controls of the truth check ------------------------------------------------------------------


def _spoil_sync(change):
    """Give each model that vLLM makes a load_weights that changes tensors; a patch may wrap the class's own."""

    def spoil(model):
        load = model.load_weights
        model.load_weights = lambda weights: load((name, change(name, tensor)) for name, tensor in weights)

    on_models(spoil)


def drop_bias():
    """Set the router's correction bias to zero in each weight sync."""
    _spoil_sync(lambda name, t: t * 0 if "e_score_correction_bias" in name else t)


def spoil_nothing():
    """Install the hook of a broken sync without a change, as the negative control."""
    _spoil_sync(lambda name, t: t)


# -- ranks of vLLM that do not work together as they should ------------------------------------------------------------


def missing_all_reduce():
    """Leave one layer's output projections unsummed over vLLM's tensor-parallel ranks."""

    def forget(model):
        model.model.layers[3].self_attn.o_proj.reduce_results = False

    on_models(forget)


def wrong_dp_rank():
    """Give each rank of two the experts of the other, as if the data-parallel ranks were swapped."""
    layer = "vllm.model_executor.layers.fused_moe.layer"
    wrap(layer, "determine_expert_map", lambda original, size, rank, experts: original(size, 1 - rank, experts))


# -- memory that the rollout's sleep does not free ---------------------------------------------------------------------


def sleep_frees_nothing():
    """Let the allocator of vLLM's sleep mode keep all memory on rank 1, as was found on several nodes."""
    if os.environ.get("RANK") == "1":
        after_import(
            "vllm_ascend.device_allocator.camem",
            lambda module: setattr(module, "python_unmap_and_release", lambda *handle: None),
        )


# -- what the watch counts ---------------------------------------------------------------------------------------------


def print_watched_groups():
    """Print the groups that the watch counts, after each rollout."""

    def print_after(rollout):
        generate = rollout.generate_sequences

        def generate_sequences(*args, **kwargs):
            outputs = generate(*args, **kwargs)
            print("watch counts", sorted(heartbeat.current_heartbeat()._begun_by_group()))
            return outputs

        rollout.generate_sequences = generate_sequences

    after_init(ROLLOUT, "vLLMRollout", print_after)


# -- spoilt destination maps: controls of the resharder's verification -------------------------------------------------


def swap_experts():
    """Swap the destinations of two experts as soon as vLLM's memory has been mapped."""

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
    """Allocate gradients again, zeroed, between the weight sync and the rollout, where no patch of ours acts."""

    def preprocess_data(original, self, data):
        for chunk in self.actor_module:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.untyped_storage().resize_(buffer.numel * buffer.grad_data.element_size())
                buffer.grad_data.zero_()
        return original(self, data)

    manager = "verl.workers.sharding_manager.megatron_vllm"
    wrap(manager, "MegatronVLLMShardingManager.preprocess_data", preprocess_data)


class LeftOnDeviceError(RuntimeError):
    """Report the bytes that were not offloaded."""


def nothing_left():
    """End the run if any storage of Megatron's DDP is not empty when vLLM is about to generate."""

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
    """Kill rank 1 in its second save, with half of the tensors written."""

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
    """Kill all ranks in the second update of their processes; processes that resume at that step make only one."""
    updates = []

    def update(update_policy, *args, **kwargs):
        updates.append(None)
        if len(updates) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return update_policy(*args, **kwargs)

    wrap("verl.workers.actor.megatron_actor", "MegatronPPOActor.update_policy", update)


def stopped_in_update():
    """Stop rank 1 by SIGSTOP in the second update of its process; one that resumes at that step makes only one.

    When it is continued for its stack, it stops again: otherwise the step could end before the run does.
    """
    updates = []

    def update(update_policy, *args, **kwargs):
        updates.append(None)
        while len(updates) == 2 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return update_policy(*args, **kwargs)

    wrap("verl.workers.actor.megatron_actor", "MegatronPPOActor.update_policy", update)


# -- faults that a bring-up must name ----------------------------------------------------------------------------------


def wrong_rope():
    """Turn by the negative angle in the emulated operator of decode graphs."""
    wrap("torch_npu", "npu_interleave_rope", lambda rope, x, cos, sin: rope(x, cos, -sin))


def wrong_combine():
    """Halve the weights of experts where MC2 adds their results up."""

    def combine(original, *args, expert_scales, **given):
        return original(*args, expert_scales=expert_scales / 2, **given)

    wrap("torch_npu", "npu_moe_distribute_combine", combine)


def slow_group():
    """Let each all-reduce of the group of ranks 2 and 3 take longer."""
    import torch.distributed as dist

    def all_reduce(original, tensor, *args, group=None, **given):
        if group is not None and dist.get_process_group_ranks(group) == [2, 3]:
            time.sleep(0.3)
        return original(tensor, *args, group=group, **given)

    wrap("torch.distributed", "all_reduce", all_reduce)


def stale_kv():
    """Let decode graphs write the keys and values of a sequence where another one has its own."""

    def exec_kv(original, self, hidden_states, cos, sin, kv_cache, slots, *args):
        return original(self, hidden_states, cos, sin, kv_cache, slots.roll(1), *args)

    wrap("vllm_ascend.attention.mla_v1", "AscendMLAImpl.exec_kv", exec_kv)


def slow_then_stuck_disk():
    """Flush rank 1's files a little at a time, each after a second; those of step 2, never."""
    if os.environ.get("RANK") != "1":
        return

    def flush(original, self):
        time.sleep(1e6 if "global_step_2" in self.path.parts else 1)
        original(self)

    writer = "verl_patches.weights.writer"
    after_import(writer, lambda module: setattr(module, "SYNC_BYTES", 32 << 10))
    wrap(writer, "NewFile._flush", flush)
