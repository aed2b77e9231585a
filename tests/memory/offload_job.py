"""Offload of Megatron's real DDP and Adam on gloo ranks, under the rows of VERL_PATCHES and without MindSpeed.

Each part is a function; `found` runs several and returns plain data.
"""

import contextlib
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from omegaconf import OmegaConf

from tests.memory.counted import Counted
from tests.memory.offload_objects import (
    BF16,
    FP32,
    chunk,
    load,
    moves,
    offload,
    refused,
    same,
    sizes,
    state_bytes,
    states_of,
    step,
    trained,
    weights,
)
from tests.memory.swap_parts import counting_by_group, swap_controls, swapped  # noqa: F401  (parts)
from verl_patches.memory import counters
from verl_patches.memory.ledger import Ledger
from verl_patches.memory.offload import Grads, Optimizer, Params
from verl_patches.memory.schedule import SCHEDULE
from verl_patches.memory.swap_optimizer import swap_optimizer
from verl_patches.patching.row import subclass_of
from verl_patches.weights.train_state import Piece, Place, optimizer_shards
from verl_patches.worker.checkpoint import WorkerCheckpoint
from verl_patches.worker.context import context


def models():
    """Two chunks of an actor and a reference: offloaded, loaded for log-probs, then for training."""
    torch.manual_seed(0)
    chunks, reference = [chunk(), chunk(experts=False)], torch.nn.Linear(2, 3)
    both = Params([*chunks, reference])
    views, before, of_reference = [p.view(-1) for p in chunks[0].parameters()], weights(chunks), weights([reference])
    found = {"at first": sizes(chunks)}
    Grads(chunks).free()
    both.offload()
    offload(chunks)
    found["offloaded"] = sizes(chunks)
    found["reference"] = sum(p.untyped_storage().nbytes() for p in reference.parameters())
    found["first moves"] = counters.take_moves()
    both.load()
    found["for log-probs"] = sizes(chunks)
    found["weights are back"] = same(weights(chunks), before) and same(weights([reference]), of_reference)
    both.offload()
    found["moves for log-probs"] = counters.take_moves()
    load(chunks)
    found["loaded"] = sizes(chunks)
    found["gradients"] = [p.main_grad.abs().sum().item() for each in chunks for p in each.parameters()]
    found["views are of the same memory"] = same(views, [p.view(-1) for p in chunks[0].parameters()])
    with torch.no_grad():
        for parameter in (p for each in chunks for p in each.parameters()):
            parameter.add_(1)
            parameter.main_grad.fill_(7)
    offload(chunks)
    load(chunks)
    found["training is kept"] = same(weights(chunks), [weight + 1 for weight in before])
    found["gradients"] += [p.main_grad.abs().sum().item() for each in chunks for p in each.parameters()]
    found["moves of training"] = counters.take_moves()
    return found


def verl_alone():
    """Control: bytes that verl's own offload leaves."""
    from verl.utils import megatron_utils as verl

    chunks = [chunk()]
    verl.offload_megatron_model_to_cpu(chunks)
    return sizes(chunks)


def optimizers():
    """Every kind of optimizer, three steps with everything offloaded between them, against the same without."""
    found = {}
    for name, dtype in (("fp32", FP32), ("bf16", BF16), ("plain fp32", FP32), ("plain bf16", BF16)):
        plain, offloaded = (trained(dtype, not name.startswith("plain")) for _ in range(2))
        equal, steps = [], []
        counters.take_moves()
        for number in range(3):
            norm = step(*plain, number)
            load(*offloaded)
            equal.append(step(*offloaded, number) == norm and same(weights(plain[0]), weights(offloaded[0])))
            offload(*offloaded)
            steps.append(counters.offload_of_step([counters.take_moves()]))
        left = [s.untyped_storage().nbytes() for state in states_of(offloaded[1]) for s in state.values() if s.dim()]
        classes = sorted({type(one).__name__ for one in offloaded[1].chained_optimizers})
        found[name] = {"classes": classes, "equal": equal, "steps": steps, "left": sum(left)}
    return found


def spoilt():
    """Each way in which other code can spoil an offload, and its error."""

    def away():
        chunks = [chunk()]
        offload(chunks)
        return chunks

    def other_storage():
        chunks = away()
        buffer = chunks[0].expert_parallel_buffers[0]
        buffer.param_data = torch.zeros_like(buffer.param_data, device="cpu")
        load(chunks)

    def other_size():
        chunks = away()
        chunks[0].buffers[0].param_data.untyped_storage().resize_(12)
        load(chunks)

    def emptied():
        chunks = [chunk()]
        chunks[0].buffers[0].grad_data.untyped_storage().resize_(0)
        offload(chunks)

    def written_reference():
        reference = torch.nn.Linear(2, 3)
        params = Params([reference])
        params.offload()
        params.load()
        with torch.no_grad():
            reference.bias.add_(1)
        params.offload()

    def gradient_without_ddp():
        reference = torch.nn.Linear(2, 3)
        reference(torch.ones(2)).sum().backward()
        Params([reference]).offload()

    def state_of_other_size():
        chunks, optimizer = trained()
        step(chunks, optimizer, 0)
        Optimizer(optimizer).offload()
        states_of(optimizer)[0]["exp_avg_sq"].untyped_storage().resize_(4)
        Optimizer(optimizer).load()

    cases = (other_storage, other_size, emptied, written_reference, gradient_without_ddp, state_of_other_size)
    return {case.__name__: refused(case) for case in cases}


def counted():
    """[(seen, recorded, planned bytes; seen, recorded host bytes)] of steps, and of a control that copies gradients."""
    found = {}
    for copied in (False, True):
        chunks, optimizer = trained()
        step(chunks, optimizer, 0)
        found[str(copied)] = steps = []
        for number in (1, 2, 3):
            counters.take_moves()
            with Counted() as seen:
                if copied:
                    _ = [buffer.grad_data.cpu() for each in chunks for buffer in each.buffers]
                offload(chunks, optimizer)
                load(chunks, optimizer)
            step(chunks, optimizer, number)
            own = counters.take_moves()
            recorded, host = (sum(move[key] for move in own) for key in ("copied_bytes", "host_bytes"))
            planned = sum(move["bytes"] for move in own if move["verb"] in counters.COPYING)
            steps.append((seen.copied_bytes, recorded, planned, seen.host_bytes, host))
    return found


class Upstream:
    """verl's worker as far as checkpoints and the ledger look at it; `save` and `load` are its own bodies."""

    _is_actor, _is_rollout, _is_ref = True, False, False

    def __init__(self, config, role):
        self.save = self.load = lambda: None

    def save_checkpoint(self, folder):
        self.save()

    def load_checkpoint(self, folder):
        self.load()


def worker_of(chunks, optimizer, swap=False, offload=True):
    """The recipe's worker over `Upstream`."""
    from verl_patches.worker.recipe_worker import RecipeWorker

    megatron = {"param_offload": True, "optimizer_offload": offload}
    recipe = {"line": "pypi", "platform": "cpu", "weight_sync": {"enabled": True}, "reshard": {"bucket_bytes": 8}}
    recipe |= {
        "train": {"skip_old_log_prob": False, "swap_optimizer": swap, "use_remove_padding": True},
        "memory": {"ledger": "off"},
        "watch": {"action": "off"},
    }
    config = {"actor": {"megatron": megatron}, "ref": {"megatron": megatron}, "rollout": {"enforce_eager": True}}
    worker = subclass_of(Upstream, RecipeWorker)(OmegaConf.create({**config, "recipe": recipe}), "actor")
    worker.actor_module, worker.actor_optimizer = chunks, optimizer
    worker.checkpoint = None  # as with row checkpoint.parts off: verl's own bodies are called
    return worker


@contextlib.contextmanager
def started(worker):
    """The scheduler of this process, which moves the memory of `worker`."""
    worker.memory.start(worker)
    try:
        yield context().scheduler
    finally:
        context().scheduler = context().ledger = None


def checkpoints():
    """Checkpoints of a worker that verl moves: states are offloaded before and after."""
    chunks, optimizer = trained(BF16)
    step(chunks, optimizer, 0)
    states = states_of(optimizer)
    before = [state["exp_avg"].clone() for state in states]
    Optimizer(optimizer).offload()
    worker, found = worker_of(chunks, optimizer), {}  # nothing started: no scheduler in this process

    def save():
        found["saved"] = same([state["exp_avg"] for state in states], before)

    def load():
        for state in states:
            state["exp_avg"] = state["exp_avg"] * 2

    worker.save, worker.load = save, load
    worker.save_checkpoint("here")
    found["held"] = sum(state["exp_avg"].untyped_storage().nbytes() for state in states)
    counters.take_moves()
    worker.load_checkpoint("here")
    found["new host memory"] = sum(move["host_bytes"] for move in counters.take_moves())
    Optimizer(optimizer).load()
    found["loaded"] = same([state["exp_avg"] for state in states], [tensor * 2 for tensor in before])
    return found


def checkpoints_as_scheduled():
    """With our schedule, offloaded weights are loaded for a checkpoint and offloaded again."""
    chunks, optimizer = trained(BF16)
    worker, found, before = worker_of(chunks, optimizer), {}, weights(chunks)

    def save():
        found["saved"] = same(weights(chunks), before)

    def load():
        for parameter in chunks[0].parameters():
            parameter.data.mul_(2)

    worker.save, worker.load = save, load
    found["verl moves"] = [getattr(worker, f"_is_offload_{what}") for what in ("param", "optimizer")]
    moves()
    worker.memory.built(chunks, optimizer)
    found["built"] = moves()
    with started(worker) as scheduler:
        for name in ("save", "load"):
            getattr(worker, f"{name}_checkpoint")("here")
            found[name] = moves()
        found["held"] = sizes(chunks)
        scheduler.begin("update")
        doubled = len(list(chunks[0].parameters()))
        found["loaded"] = same(weights(chunks), [weight * 2 for weight in before[:doubled]] + before[doubled:])
        moves()
        worker.save = lambda: None
        worker.save_checkpoint("here")
        found["save while all is on the device"] = moves()
    return found


def checkpoints_without_states_before():
    """{case: bytes of states in load_checkpoint, after it, in the update}: a resume in fp32, which makes the states."""

    def bytes_of(case):
        chunks, optimizer = trained(FP32)
        worker, held = worker_of(chunks, optimizer, offload=case == "moved"), []

        def load():
            for one in optimizer.chained_optimizers:
                for parameter in (p for group in one.optimizer.param_groups for p in group["params"]):
                    moments = {name: torch.ones_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    one.optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
            held.append(state_bytes(optimizer))

        worker.load = load
        with started(worker) as scheduler:
            if case == "swapped":
                swap_optimizer(optimizer, 2)
            worker.load_checkpoint("here")
            held.append(state_bytes(optimizer))
            scheduler.begin("update")
            if case != "swapped":
                ones = [state[name] for state in states_of(optimizer) for name in ("exp_avg", "exp_avg_sq")]
                held.append(sum(float(tensor.sum()) * 4 for tensor in ones))
        return held

    return {case: bytes_of(case) for case in ("moved", "stays", "swapped")}


def checkpoint_copies():
    """What a checkpoint finds on the host after an update that the schedule ended, and what it changes."""
    chunks, optimizer = trained(BF16)
    worker, found = worker_of(chunks, optimizer), {}
    checkpoint = WorkerCheckpoint(worker)
    worker.memory.built(chunks, optimizer)
    with started(worker) as scheduler:
        for number in range(2):
            scheduler.begin("update")
            step(chunks, optimizer, number)
            before = [t.clone() for t in checkpointed(chunks, optimizer)]
            scheduler.end()
        moves()
        storages, copied = checkpoint._copy_to_host()
        places = [(t, Place(tuple(t.shape), t.stride(), 0)) for t in checkpointed(chunks, optimizer)]
        pieces = [Piece(SimpleNamespace(key=n), t, (place,)) for n, (t, place) in enumerate(places)]
        contents = checkpoint._contents(pieces, storages)
        params = sum(b.numel * 2 for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers))
        found["copied"] = copied == params
        found["as trained"] = same([next(contents(piece)) for piece in pieces], before)
        scheduler.begin("reshard")
        scheduler.begin("update")
        found["moves"] = moves()
        step(chunks, optimizer, 2)
        found["while the update runs"] = same([next(contents(piece)) for piece in pieces], before)
        scheduler.end()
        found["after it"] = same([next(contents(piece)) for piece in pieces], before)
    return found


def checkpointed(chunks, optimizer):
    """Weights, main parameters and moments."""
    shards = [tensor for shard in optimizer_shards(optimizer) for tensor in shard.states.values()]
    return [*(p.detach() for each in chunks for p in each.parameters()), *shards]


def watched():
    """The groups that WorkerMemory registers, with an unswapped and a swapped optimizer, and memory that is left."""

    def watch(swap):
        chunks, optimizer = trained(BF16)
        attention = torch.nn.Linear(4, 6, bias=False)
        attention.impl = SimpleNamespace(W_UV=attention.weight.data.clone(), W_UK_T=attention.weight.data.t())
        runner = SimpleNamespace(model=attention, kv_caches=[torch.zeros(2)])
        model_config = SimpleNamespace(enable_sleep_mode=False)
        core = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config), model_executor=SimpleNamespace())
        core.model_executor.driver_worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        engine, executor = SimpleNamespace(llm_engine=core), SimpleNamespace(held_bytes=0)
        worker = worker_of(chunks, optimizer, swap=swap)
        worker._is_rollout = worker._is_ref = True
        worker.rollout, worker.ref_module = SimpleNamespace(inference_engine=engine), [torch.nn.Linear(2, 3)]
        worker.sharding_manager = SimpleNamespace(resharder=SimpleNamespace(executor=executor))
        stays = {"actor_params", "grads", "optimizer", "rollout_weights", "kv_cache", "ref_params"}
        ledger = context().ledger = Ledger(SCHEDULE, stays, "strict")
        if swap:
            swap_optimizer(optimizer, 4, raise_peak=context().raise_peak)
        worker.memory._watch(worker, ledger)
        ledger.enter("reshard")
        ledger.enter("update")
        step(chunks, optimizer, 0)
        record = ledger.take()["records"][-1]
        found = {"bytes": record["bytes"], "in the update": record["peak_bytes"] - record["total_bytes"]}
        ledger.enter("reshard")
        executor.held_bytes = 5
        found["sync"] = refused(lambda: ledger.enter("wake_kv"))
        executor.held_bytes = 0
        if swap:
            optimizer.chained_optimizers[0].recipe_offload_state.load()
        found["states"] = refused(lambda: ledger.enter("wake_kv"))
        model_config.enable_sleep_mode, engine.awake = True, {"weights"}
        found["unmapped"] = refused(lambda: ledger.enter("wake_kv"))
        return found

    try:
        return {"unswapped": watch(False), "swapped": watch(True)}
    finally:
        context().ledger = None


def found(parts):
    """{part: its result}."""
    parallel_state.initialize_model_parallel()
    return {part: globals()[part]() for part in parts}
