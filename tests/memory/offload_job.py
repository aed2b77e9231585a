"""What several tests of offload look at, in one process under the rows of VERL_PATCHES: Megatron's real DDP and Adam.

`python offload_job.py PART...` prints JSON. One gloo rank, or WORLD_SIZE of them that meet at the file STORE; no
MindSpeed.
"""

from verl_patches import prelude_patch  # noqa: F401

# isort: split
import contextlib

import torch
from megatron.core import parallel_state

from tests.memory.counted import Counted
from tests.memory.offload_objects import BF16, FP32, chunk, refused, same, sizes, step, trained, weights
from tests.memory.swap_parts import counting_by_group, swap_controls, swapped  # noqa: F401  (parts)
from verl_patches.memory import counters
from verl_patches.memory.offload import (
    load_megatron_model_to_gpu,
    load_megatron_optimizer,
    offload_megatron_model_to_cpu,
    offload_megatron_optimizer,
)


def models():
    """Two chunks of an actor and a reference, moved as verl's worker moves them."""
    torch.manual_seed(0)
    chunks, reference = [chunk(), chunk(experts=False)], torch.nn.Linear(2, 3)
    views, before, of_reference = [p.view(-1) for p in chunks[0].parameters()], weights(chunks), weights([reference])
    found = {"at first": sizes(chunks)}
    offload_megatron_model_to_cpu([*chunks, reference])
    offload_megatron_model_to_cpu(chunks)
    found["offloaded"] = sizes(chunks)
    found["reference"] = sum(p.untyped_storage().nbytes() for p in reference.parameters())
    found["first moves"] = counters.take_moves()
    load_megatron_model_to_gpu([*chunks, reference], load_grad=False)
    found["for log-probs"] = sizes(chunks)
    found["weights are back"] = same(weights(chunks), before) and same(weights([reference]), of_reference)
    offload_megatron_model_to_cpu([*chunks, reference])
    found["moves for log-probs"] = counters.take_moves()
    load_megatron_model_to_gpu(chunks)
    found["loaded"] = sizes(chunks)
    found["gradients"] = [p.main_grad.abs().sum().item() for each in chunks for p in each.parameters()]
    found["weights are back again"] = same(weights(chunks), before)
    found["views are of the same memory"] = same(views, [p.view(-1) for p in chunks[0].parameters()])
    with torch.no_grad():
        for each in chunks:
            for parameter in each.parameters():
                parameter.add_(1)
                parameter.main_grad.fill_(7)
    offload_megatron_model_to_cpu(chunks)
    load_megatron_model_to_gpu(chunks)
    found["training is kept"] = same(weights(chunks), [weight + 1 for weight in before])
    found["gradients of the next step"] = [p.main_grad.abs().sum().item() for e in chunks for p in e.parameters()]
    found["moves of training"] = counters.take_moves()
    return found


def verl_alone():
    """Control: what verl's own offload leaves."""
    from verl.utils import megatron_utils as verl

    chunks = [chunk()]
    verl.offload_megatron_model_to_cpu(chunks)
    return sizes(chunks)


def optimizers():
    """Every kind of optimizer, three steps with everything offloaded between them, against the same without."""
    found = {}
    for name, dtype, distributed in (
        ("fp32", FP32, True),
        ("bf16", BF16, True),
        ("plain fp32", FP32, False),
        ("plain bf16", BF16, False),
    ):
        plain, offloaded, equal, every = trained(dtype, distributed), trained(dtype, distributed), [], []
        counters.take_moves()
        for number in range(3):
            norm = step(*plain, number)
            load_megatron_model_to_gpu(offloaded[0])
            load_megatron_optimizer(offloaded[1])
            equal.append(step(*offloaded, number) == norm and same(weights(plain[0]), weights(offloaded[0])))
            offload_megatron_model_to_cpu(offloaded[0])
            offload_megatron_optimizer(offloaded[1])
            every.append(counters.offload_of_step([counters.take_moves()]))
        left = sum(
            s.untyped_storage().nbytes()
            for one in offloaded[1].chained_optimizers
            for state in one.optimizer.state.values()
            for s in state.values()
            if s.dim()
        )
        found[name] = {
            "classes": sorted({type(one).__name__ for one in offloaded[1].chained_optimizers}),
            "equal": equal,
            "steps": every,
            "left": left,
        }
    return found


def spoilt():
    """Each way in which an offload can go wrong, and what it is refused with."""

    def away():
        chunks = [chunk()]
        offload_megatron_model_to_cpu(chunks)
        return chunks

    def other_storage():
        chunks = away()
        buffer = chunks[0].expert_parallel_buffers[0]
        buffer.param_data = torch.zeros_like(buffer.param_data, device="cpu")
        load_megatron_model_to_gpu(chunks)

    def other_size():
        chunks = away()
        chunks[0].buffers[0].param_data.untyped_storage().resize_(12)
        load_megatron_model_to_gpu(chunks)

    def emptied():
        chunks = [chunk()]
        chunks[0].buffers[0].grad_data.untyped_storage().resize_(0)
        offload_megatron_model_to_cpu(chunks)

    def written_reference():
        reference = torch.nn.Linear(2, 3)
        offload_megatron_model_to_cpu([reference])
        load_megatron_model_to_gpu([reference], load_grad=False)
        with torch.no_grad():
            reference.bias.add_(1)
        offload_megatron_model_to_cpu([reference])

    def gradient_without_ddp():
        reference = torch.nn.Linear(2, 3)
        reference(torch.ones(2)).sum().backward()
        offload_megatron_model_to_cpu([reference])

    def state_of_other_size():
        chunks, optimizer = trained()
        step(chunks, optimizer, 0)
        offload_megatron_optimizer(optimizer)
        states = optimizer.chained_optimizers[0].optimizer.state
        next(iter(states.values()))["exp_avg_sq"].untyped_storage().resize_(4)
        load_megatron_optimizer(optimizer)

    cases = (other_storage, other_size, emptied, written_reference, gradient_without_ddp, state_of_other_size)
    return {case.__name__: refused(case) for case in cases}


def counted():
    """Our own account of a step against a count from outside, and a control that copies gradients too."""
    found = {}
    for name in ("as it is", "gradients copied"):
        chunks, optimizer = trained()
        step(chunks, optimizer, 0)
        every = []
        for number in (1, 2, 3):
            counters.take_moves()
            with Counted() as seen:
                if name == "gradients copied":
                    kept = [buffer.grad_data.cpu() for each in chunks for buffer in each.buffers]
                    del kept
                offload_megatron_model_to_cpu(chunks)
                offload_megatron_optimizer(optimizer)
                load_megatron_model_to_gpu(chunks)
                load_megatron_optimizer(optimizer)
            step(chunks, optimizer, number)
            mine = counters.take_moves()
            every.append(
                {
                    "seen": seen.copied_bytes,
                    "told": sum(m["copied_bytes"] for m in mine),
                    "seen host": seen.host_bytes,
                    "told host": sum(m["host_bytes"] for m in mine),
                    "plan": sum(m["bytes"] for m in mine if m["verb"] in counters.COPYING),
                }
            )
        found[name] = every
    return found


class Upstream:
    """verl's worker as far as checkpoints and the ledger look at it; `save` and `load` are its own bodies."""

    _is_actor, _is_rollout, _is_ref = True, False, False

    def __init__(self, config, role):
        self.save = self.load = lambda: None

    def save_checkpoint(self):
        self.save()

    def load_checkpoint(self):
        self.load()


def worker_of(chunks, optimizer, swap=False, offload=True):
    """The recipe's worker over `Upstream`, and the process's schedule started on what it has."""
    from omegaconf import OmegaConf

    from verl_patches.patching.row import subclass_of
    from verl_patches.worker.recipe_worker import RecipeWorker

    megatron = {"param_offload": True, "optimizer_offload": offload}
    config = OmegaConf.create(
        {
            "actor": {"megatron": megatron},
            "ref": {"megatron": megatron},
            "rollout": {"enforce_eager": True},
            "recipe": {
                "line": "pypi",
                "platform": "cpu",
                "weight_sync": {"enabled": True},
                "reshard": {"bucket_bytes": 8},
                "train": {"skip_old_log_prob": False, "swap_optimizer": swap},
                "memory": {"ledger": "off"},
            },
        }
    )
    worker = subclass_of(Upstream, RecipeWorker)(config, "actor")
    worker.actor_module, worker.actor_optimizer = chunks, optimizer
    return worker


@contextlib.contextmanager
def started(worker):
    """The scheduler of this process, which moves what `worker` has."""
    from verl_patches.worker.context import context

    worker.memory.start(worker)
    try:
        yield context().scheduler
    finally:
        context().scheduler = context().ledger = None


def checkpoints():
    """save_checkpoint and load_checkpoint of a worker that verl moves: states are away before and after."""
    chunks, optimizer = trained(BF16)
    step(chunks, optimizer, 0)
    states = [state for one in optimizer.chained_optimizers for state in one.optimizer.state.values()]
    before = [state["exp_avg"].clone() for state in states]
    offload_megatron_optimizer(optimizer)
    worker, found = worker_of(chunks, optimizer), {}  # nothing started: no scheduler in this process

    def held():
        return sum(state["exp_avg"].untyped_storage().nbytes() for state in states)

    def save():
        found["saved"] = same([state["exp_avg"] for state in states], before)

    def load():
        for state in states:
            state["exp_avg"] = state["exp_avg"] * 2

    worker.save, worker.load = save, load
    found["away"] = held()
    worker.save_checkpoint()
    found["away again"] = held()
    counters.take_moves()
    worker.load_checkpoint()
    found["host memory for the loaded ones"] = sum(m["host_bytes"] for m in counters.take_moves())
    load_megatron_optimizer(optimizer)
    found["loaded"] = same([state["exp_avg"] for state in states], [each * 2 for each in before])
    return found


def checkpoints_as_scheduled():
    """With a schedule, verl's own calls move nothing: weights that are away come for a checkpoint, and go again."""
    chunks, optimizer = trained(BF16)
    worker, found, before = worker_of(chunks, optimizer), {}, weights(chunks)

    def save():
        found["saved"] = same(weights(chunks), before)

    def load():
        for parameter in chunks[0].parameters():
            parameter.data.mul_(2)

    worker.save, worker.load = save, load
    found["verl moves"] = [getattr(worker, f"_is_offload_{what}") for what in ("param", "optimizer")]
    counters.take_moves()
    worker.memory.built(chunks, optimizer)
    found["moves as built"] = [f"{m['verb']} {m['group']}" for m in counters.take_moves()]
    with started(worker) as scheduler:
        for name in ("save", "load"):
            counters.take_moves()
            getattr(worker, f"{name}_checkpoint")()
            found[f"{name} moves"] = [f"{m['verb']} {m['group']}" for m in counters.take_moves()]
        found["held"] = sizes(chunks)
        scheduler.begin("update")
        doubled = len(list(chunks[0].parameters()))
        found["loaded"] = same(weights(chunks), [each * 2 for each in before[:doubled]] + before[doubled:])
        counters.take_moves()
        worker.save = lambda: None
        worker.save_checkpoint()
        found["save moves while all is there"] = counters.take_moves()
    return found


def checkpoints_without_states_before():
    """A resume in fp32: nothing is away before, load_checkpoint makes the states; who has them on the host then."""
    from verl_patches.memory.measure import held_bytes, optimizer_tensors
    from verl_patches.memory.swap_optimizer import swap_optimizer

    def left(case):
        chunks, optimizer = trained(FP32)
        worker, held = worker_of(chunks, optimizer, offload=case == "moved"), []

        def load():
            for one in optimizer.chained_optimizers:
                for group in one.optimizer.param_groups:
                    for parameter in group["params"]:
                        states = {"exp_avg": torch.ones_like(parameter), "exp_avg_sq": torch.ones_like(parameter)}
                        one.optimizer.state[parameter] = {"step": torch.tensor(3.0), **states}
            held.append(held_bytes(optimizer_tensors(optimizer), "cpu"))

        worker.load = load
        with started(worker) as scheduler:
            if case == "swapped":
                swap_optimizer(optimizer, 2)
            worker.load_checkpoint()
            held.append(held_bytes(optimizer_tensors(optimizer), "cpu"))
            scheduler.begin("update")
            if case != "swapped":
                held.append(sum(float(t.sum()) * 4 for t in optimizer_tensors(optimizer)))
        return held

    return {case: left(case) for case in ("moved", "stays", "swapped")}


def watched():
    """What WorkerMemory registers of a worker, with a swapped optimizer and without: every group of the table."""
    from types import SimpleNamespace

    from verl_patches.memory.ledger import Ledger
    from verl_patches.memory.schedule import SCHEDULE
    from verl_patches.memory.swap_optimizer import swap_optimizer
    from verl_patches.worker.context import context

    def watch(swap):
        chunks, optimizer = trained(BF16)
        attention, engine = torch.nn.Linear(4, 6, bias=False), SimpleNamespace()
        attention.impl = SimpleNamespace(W_UV=attention.weight.data.clone(), W_UK_T=attention.weight.data.t())
        runner = SimpleNamespace(model=attention, kv_caches=[torch.zeros(2)])
        engine.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False)),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner))),
        )
        sync = SimpleNamespace(executor=SimpleNamespace(held_bytes=0))
        worker = worker_of(chunks, optimizer, swap=swap)
        worker._is_rollout = worker._is_ref = True
        worker.rollout, worker.ref_module = SimpleNamespace(inference_engine=engine), [torch.nn.Linear(2, 3)]
        worker.sharding_manager = SimpleNamespace(resharder=sync)
        stays = {"actor_params", "grads", "optimizer", "rollout_weights", "kv_cache", "ref_params"}
        kept = context().ledger = Ledger(SCHEDULE, stays, "strict")
        if swap:
            swap_optimizer(optimizer, 4, look=context().look)
        worker.memory._watch(worker, kept)
        kept.enter("reshard")
        kept.enter("update")
        step(chunks, optimizer, 0)
        before, record = kept._records[-1]["bytes"], kept.take()["records"][-1]
        found = {
            "groups": sorted(before),
            "absorbed": before["rollout_weights"],
            "in the update": record["peak_bytes"] - record["total_bytes"],
            "leaks": [],
        }
        kept.enter("reshard")
        sync.executor.held_bytes = 5
        found["leaks"].append(refused(lambda: kept.enter("wake_kv")))
        sync.executor.held_bytes = 0
        optimizer.chained_optimizers[0].recipe_offload_state.load() if swap else None
        found["leaks"].append(refused(lambda: kept.enter("wake_kv")))
        optimizer.chained_optimizers[0].recipe_offload_state.offload() if swap else None
        engine.llm_engine.vllm_config.model_config.enable_sleep_mode, engine.awake = True, {"weights"}
        found["unmapped"] = refused(lambda: kept.enter("wake_kv"))
        return found

    try:
        return {name: watch(name == "swapped") for name in ("whole", "swapped")}
    finally:
        context().ledger = None


def carried_out():
    """A schedule executed by handlers of real objects: moves of the second step, and what the table predicts."""
    from verl_patches.memory.measure import held_bytes, optimizer_tensors
    from verl_patches.memory.offload import actor_handlers, reference_handlers
    from verl_patches.memory.schedule import SCHEDULE, simulate
    from verl_patches.memory.scheduler import Scheduler

    chunks, optimizer = trained(BF16)
    reference = torch.nn.Linear(20, 30)
    step(chunks, optimizer, 0)
    buffers = [buffer for each in chunks for buffer in (*each.buffers, *each.expert_parallel_buffers)]
    held = {
        "actor_params": [b.param_data for b in buffers],
        "grads": [b.grad_data for b in buffers],
        "optimizer": optimizer_tensors(optimizer),
        "ref_params": reference.parameters(),
    }
    full = {group: held_bytes(list(tensors), "cpu") for group, tensors in held.items()}
    handlers = {**actor_handlers(chunks, optimizer), **reference_handlers([reference])}
    for handler in handlers.values():
        getattr(handler, "offload" if hasattr(handler, "offload") else "free")()
    scheduler, every = Scheduler(SCHEDULE, lambda: None), []
    scheduler.add(handlers)
    for number in (1, 2):
        counters.take_moves()
        for phase in SCHEDULE.phases:
            scheduler.begin(phase.name)
            if phase.name == "update":
                step(chunks, optimizer, number)
        scheduler.end()
        every.append(counters.take_moves())
    moments = simulate(SCHEDULE, full).values()
    return {
        "moves": [f"{m['verb']} {m['group']}" for m in every[1]],
        "to_device": [
            sum(m["copied_bytes"] for m in every[1] if m["verb"] == "load"),
            sum(m.to_device_bytes for m in moments),
        ],
        "to_host": [
            sum(m["copied_bytes"] for m in every[1] if m["verb"] == "offload"),
            sum(m.to_host_bytes for m in moments),
        ],
    }


def found(parts):
    """{part: what it returns}."""
    parallel_state.initialize_model_parallel()
    return {part: globals()[part]() for part in parts}
