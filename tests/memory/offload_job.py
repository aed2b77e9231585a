"""Test offload over Megatron's real DDP and Adam, in functions that test_offload.py runs on gloo ranks.

They run with the patches of VERL_PATCHES and without MindSpeed. Each raises if the statement of its name is false.
"""

import contextlib
import os
import traceback
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core import parallel_state
from omegaconf import OmegaConf

from tests.memory.offload_objects import (
    BF16,
    FP32,
    Counted,
    adam_states,
    all_equal,
    chunk,
    error_text,
    load,
    offload,
    sizes,
    state_bytes,
    step,
    take_move_names,
    trained,
    weights,
)
from tests.runs import composed
from verl_patches.memory import counters
from verl_patches.memory.ledger import Ledger
from verl_patches.memory.measure import optimizer_full_bytes
from verl_patches.memory.offload import Grads, Optimizer, Params
from verl_patches.memory.schedule import CRITIC, MEMORY_GROUPS, SCHEDULE
from verl_patches.patching.row import make_subclass
from verl_patches.weights.checkpoint_files import Place, StoredTensor, optimizer_shards
from verl_patches.worker.checkpoint import WorkerCheckpoint
from verl_patches.worker.context import context
from verl_patches.worker.memory import TrainedModel


def failures(names):
    """Return {name: traceback of that function, "" if it passes}."""
    parallel_state.initialize_model_parallel()
    texts = {}
    for name in names:
        counters.take_moves()
        try:
            globals()[name]()
            texts[name] = ""
        except Exception:
            texts[name] = traceback.format_exc()
    return texts


def nothing_stays_on_the_device_and_only_what_was_written_is_copied():
    """Offload two chunks of an actor and a reference, load them for log-probs, then for training."""
    torch.manual_seed(0)
    chunks, reference = [chunk(), chunk(experts=False)], torch.nn.Linear(2, 3)
    both, full = Params([*chunks, reference]), sizes(chunks)
    views, before, reference_weights = (
        [p.view(-1) for p in chunks[0].parameters()],
        weights(chunks),
        weights([reference]),
    )
    Grads(chunks).free()
    both.offload()
    offload(chunks)  # idempotent
    assert all(full.values()) and not any(sizes(chunks).values())
    assert not any(p.untyped_storage().nbytes() for p in reference.parameters())
    counters.take_moves()
    both.load()
    assert sizes(chunks) == {name: 0 if name.endswith("grad_data") else size for name, size in full.items()}
    assert all_equal(weights(chunks), before) and all_equal(weights([reference]), reference_weights)
    both.offload()
    groups = ["actor_params", "actor_params", "ref_params"]
    assert take_move_names() == [f"{verb} {group}" for verb in ("load", "free") for group in groups]

    def gradients():
        return {p.main_grad.abs().sum().item() for each in chunks for p in each.parameters()}

    load(chunks)
    assert sizes(chunks) == full and gradients() == {0}
    assert all_equal(views, [p.view(-1) for p in chunks[0].parameters()])  # views of the same memory
    with torch.no_grad():
        for parameter in (p for each in chunks for p in each.parameters()):
            parameter.add_(1)
            parameter.main_grad.fill_(7)
    offload(chunks)
    load(chunks)
    assert all_equal(weights(chunks), [weight + 1 for weight in before]) and gradients() == {0}
    assert {*take_move_names()} == {"load actor_params", "alloc grads", "free grads", "offload actor_params"}


def an_offloaded_optimizer_steps_as_without_with_one_copy_a_byte():
    """Compare three steps with everything offloaded between them to three without; `Counted` counts every copy."""
    for dtype in (FP32, BF16):
        plain, offloaded = trained(dtype), trained(dtype)
        for number in range(3):
            assert step(*offloaded, number) == step(*plain, number)
            assert all_equal(weights(plain[0]), weights(offloaded[0]))
            assert state_bytes(offloaded[1]) == optimizer_full_bytes(offloaded[1])
            counters.take_moves()
            with Counted() as seen:
                offload(*offloaded)
                left = state_bytes(offloaded[1])
                load(*offloaded)
            moves = counters.take_moves()
            assert left == 0 and seen.copied_bytes == copied_bytes(moves)
            assert (seen.host_bytes > 0) == (number == 0)
        moved = counters.offload_summary([moves])["moves"]
        assert moved["load optimizer"] == moved["offload optimizer"] and moved["free grads"] == moved["alloc grads"]
    with Counted() as seen:  # control: a copy that nothing records
        _ = [buffer.grad_data.cpu() for each in offloaded[0] for buffer in each.buffers]
        offload(*offloaded)
    assert seen.copied_bytes > copied_bytes(counters.take_moves()) and seen.host_bytes > 0


def copied_bytes(moves):
    return sum(move["bytes"] for move in moves if move["verb"] in ("load", "offload"))


def a_storage_that_other_code_changed_is_refused_by_name():
    def other_storage():
        chunks = [chunk()]
        offload(chunks)
        buffer = chunks[0].expert_parallel_buffers[0]
        buffer.param_data = torch.zeros_like(buffer.param_data, device="cpu")
        load(chunks)

    def written_reference():
        reference = torch.nn.Linear(2, 3)
        params = Params([reference])
        params.offload()
        params.load()
        with torch.no_grad():
            reference.bias.add_(1)
        params.offload()

    def state_of_other_size():
        chunks, optimizer = trained()
        step(chunks, optimizer, 0)
        Optimizer(optimizer).offload()
        adam_states(optimizer)[0]["exp_avg_sq"].untyped_storage().resize_(4)
        Optimizer(optimizer).load()

    for case, words in (
        (other_storage, ("expert_parallel_buffers[0].param_data", "of 0 bytes", "another one, of 512 bytes")),
        (written_reference, ("ref_params, bias", "host copy is stale")),
        (state_of_other_size, ("group 0, parameter 0, exp_avg_sq", "of 0 bytes, found its original one, of 4 bytes")),
    ):
        error = error_text(case)
        assert error.startswith("RecipeError: offload: ") and all(word in error for word in words), error


class Upstream:
    """Stand in for verl's worker for checkpoints and the ledger."""

    _is_actor, _is_rollout, _is_ref = True, False, False

    def __init__(self, config, role):
        pass


def make_worker(chunks, optimizer, offload=True):
    """Return the recipe's worker over `Upstream`."""
    from verl_patches.worker.recipe_worker import RecipeWorker

    megatron = {"param_offload": True, "optimizer_offload": offload}
    line = os.environ["VERL_PATCHES"].partition(",")[0]  # line=NAME
    settings = (line, "memory.ledger=off", "watch.action=off", "reshard.bucket_bytes=8")
    run = composed("deepseekv3_tiny_cpu", [f"recipe.{setting}" for setting in settings])
    config = {
        "actor": {"megatron": megatron},
        "ref": {"megatron": megatron},
        "model": {},
        "rollout": {"enforce_eager": True},
    }
    context().schedule, context().unmoved_groups = None, frozenset()
    worker = make_subclass(Upstream, RecipeWorker)(OmegaConf.create({**config, "run": run.text()}), "actor")
    worker.trained = TrainedModel(chunks, optimizer, None)
    return worker


@contextlib.contextmanager
def started(worker):
    """Start the scheduler of this process, which moves the memory of `worker`."""
    worker.memory.register_worker(worker, worker.trained)
    try:
        yield context().scheduler
    finally:
        context().scheduler = context().ledger = context().schedule = None


def what_a_resume_reads_is_offloaded_again():
    """Check patch memory.order in fp32, where the checkpoint's load makes the states."""

    def resume(case):
        """Return the moves of the load, and the bytes of states in it, after it, and in the update."""
        chunks, optimizer = trained(FP32)
        worker, before, held = make_worker(chunks, optimizer, offload=case == "moved"), weights(chunks), []
        worker.memory.offload_model(chunks, optimizer)

        def load(folder):
            for parameter in chunks[0].parameters():
                parameter.data.mul_(2)
            for one in optimizer.chained_optimizers:
                for parameter in (p for group in one.optimizer.param_groups for p in group["params"]):
                    moments = {name: torch.ones_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    one.optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
            held.append(state_bytes(optimizer))

        worker.checkpoint = SimpleNamespace(load=load)
        assert not worker._is_offload_param and not worker._is_offload_optimizer  # verl's own offload is off
        with started(worker) as scheduler:
            take_move_names()
            worker.load_checkpoint("here")
            moves = take_move_names()
            held.append(state_bytes(optimizer))
            scheduler.begin("update")
            ones = [state[name] for state in adam_states(optimizer) for name in ("exp_avg", "exp_avg_sq")]
            held.append(sum(float(tensor.sum()) * 4 for tensor in ones))
            doubled = len(list(chunks[0].parameters()))
            assert all_equal(weights(chunks), [weight * 2 for weight in before[:doubled]] + before[doubled:])
        return moves, held

    params = ["load actor_params"] * 2 + ["offload actor_params"] * 2
    moves, (full, *held) = resume("stays")  # negative control: optimizer_offload=false
    assert full and held == [full, full] and moves == params
    moves, held = resume("moved")
    assert held == [full, 0, full] and moves == [*params, "offload optimizer"]


def a_checkpoint_uses_the_host_copies_of_the_schedule():
    """Check that only weights, which stay on the device after an update, are copied, in place of at their offload.

    The memory that the checkpoint reads stays until the next update's states are offloaded, so an update waits for it.
    """
    chunks, optimizer = trained(BF16)
    worker = make_worker(chunks, optimizer)
    checkpoint = WorkerCheckpoint(worker)
    worker.memory.offload_model(chunks, optimizer)
    with started(worker) as scheduler:
        for number in range(2):
            scheduler.begin("update")
            step(chunks, optimizer, number)
            before = [t.clone() for t in checkpointed(chunks, optimizer)]
            scheduler.end()
        take_move_names()
        storages, copied = checkpoint._copy_to_host()
        places = [(t, Place(tuple(t.shape), t.stride(), 0)) for t in checkpointed(chunks, optimizer)]
        pieces = [StoredTensor(SimpleNamespace(key=n), t, (place,)) for n, (t, place) in enumerate(places)]
        contents = checkpoint._piece_contents(pieces, storages)

        def as_before():
            return all_equal([next(contents(piece)) for piece in pieces], before)

        assert copied == sum(b.numel * 2 for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers))
        assert as_before()
        scheduler.begin("reshard")
        scheduler.begin("update")
        weight_moves = [move for move in take_move_names() if "actor_params" in move]
        assert weight_moves == ["free actor_params"] * 2 + ["load actor_params"] * 2
        step(chunks, optimizer, 2)
        assert as_before()  # the host copies are unchanged while the update runs
        scheduler.end()
        assert not as_before()


def checkpointed(chunks, optimizer):
    """Return weights, main parameters and moments."""
    shards = [tensor for shard in optimizer_shards(optimizer) for tensor in shard.states.values()]
    return [*(p.detach() for each in chunks for p in each.parameters()), *shards]


def every_group_of_a_worker_is_watched():
    """Check that the ledger watches every group, memory that a sync leaves behind included."""
    chunks, optimizer = trained(BF16)
    attention = torch.nn.Linear(4, 6, bias=False)
    attention.impl = SimpleNamespace(W_UV=attention.weight.data.clone(), W_UK_T=attention.weight.data.t())
    runner = SimpleNamespace(model=attention, kv_caches=[torch.zeros(2)])
    model_config = SimpleNamespace(enable_sleep_mode=False)
    core = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config), model_executor=SimpleNamespace())
    core.model_executor.driver_worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine, executor = SimpleNamespace(llm_engine=core), SimpleNamespace(buffer_bytes=0)
    worker = make_worker(chunks, optimizer)
    worker._is_rollout = worker._is_ref = True
    worker.rollout, worker.ref_module = SimpleNamespace(inference_engine=engine), [torch.nn.Linear(2, 3)]
    worker.sharding_manager = SimpleNamespace(resharder=SimpleNamespace(executor=executor))
    unmoved_groups = {"actor_params", "grads", "optimizer", "rollout_weights", "kv_cache", "ref_params"}
    with mock.patch.object(context(), "ledger", Ledger(SCHEDULE, unmoved_groups, "strict")):
        ledger = context().ledger
        worker.memory._register_groups(worker, worker.trained, ledger)
        ledger.enter("reshard")
        ledger.enter("update")
        step(chunks, optimizer, 0)
        record = ledger.take()["records"][-1]
        assert record["peak_bytes"] > record["total_bytes"]  # with Adam's states, which the step has made
        assert set(record["bytes"]) == set(MEMORY_GROUPS) - {"tensor_cache", "reward_params", *CRITIC}
        assert record["bytes"]["rollout_weights"] == 2 * 4 * 6 * 4  # W_UK_T is a view of the weight, W_UV a copy
        ledger.enter("reshard")
        executor.buffer_bytes = 5
        error = error_text(lambda: ledger.enter("wake_kv"))
        assert "reshard_buffers" in error and "holds 5 bytes, expected 0" in error
        executor.buffer_bytes = 0
        assert not error_text(lambda: ledger.enter("wake_kv"))
        model_config.enable_sleep_mode, engine.awake = True, {"weights"}  # unmapped; storages still exist
        error = error_text(lambda: ledger.enter("wake_kv"))
        assert "kv_cache" in error and "holds 0 bytes" in error
