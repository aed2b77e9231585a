"""What one rank does in test_mindspeed_update.py: updates of verl's worker, watched."""

from __future__ import annotations

from pathlib import Path

from tests.model.mindspeed_job import start_worker, update_of
from verl_patches.memory.host_backed import single_optimizers
from verl_patches.worker.step_guard import parameter_names


def update_job(folder: Path, config, bad_rank: int | None, args) -> dict:
    """Two updates; with `bad_rank` a third, in which the gradients of one parameter of that rank are NaN, and a fourth.

    Returns metrics and weights of each. `events` of the second: "sync" where a bucket's reduction starts, "grad NAME"
    where backward reaches a parameter, "forward". And Adam's groups.
    """
    worker, tensors = start_worker(folder, config)
    chunk, optimizers = worker.actor_module[0], single_optimizers(worker.actor_optimizer)
    events, found = [], {"metrics": [], "weights": [], "biases": [], "skipped": []}
    _watch(chunk, events)
    tokens = _watch_biases()
    for number in range(2 if bad_rank is None else 4):
        hook = _spoil(chunk) if (number, bad_rank) == (2, args.rank) else None
        events.clear()
        found["metrics"].append(update_of(worker, tensors)[1])
        found["skipped"].append(worker.step_guard.take())
        found["weights"].append([param.detach().clone() for param in chunk.parameters()])
        found["biases"].append([bias.clone() for name, bias in chunk.named_buffers() if name.endswith("expert_bias")])
        if number == 1:
            found["events"] = list(events)
        if hook is not None:
            hook.remove()
    found["tokens"] = tokens
    groups = [group for one in optimizers for group in one.optimizer.param_groups]
    return {**found, "adam": [(*group["betas"], group["eps"]) for group in groups]}


def _watch(chunk, events: list[str]) -> None:
    def noting(original, event):
        def call(*args, **kwargs):
            events.append(event)
            return original(*args, **kwargs)

        return call

    for bucket in (b for each in (*chunk.buffers, *chunk.expert_parallel_buffers) for b in each.buckets):
        bucket.start_grad_sync = noting(bucket.start_grad_sync, "sync")
    for param, name in parameter_names(chunk).items():
        param.register_hook(lambda grad, name=name: events.append(f"grad {name}"))
    chunk.register_forward_pre_hook(lambda *_: events.append("forward"))


def _watch_biases() -> list:
    """Gets (tokens by expert on this rank, rate) of each update of the correction biases."""
    from mindspeed_llm.core.distributed import finalize_model_grads as module

    seen, original = [], module.get_updated_expert_bias

    def update(tokens, biases, rate):
        own = tokens.clone()
        result = original(tokens, biases, rate)
        seen.append(
            {"own": own, "all": tokens.clone(), "rate": rate, "before": biases.clone(), "after": result.clone()}
        )
        return result

    module.get_updated_expert_bias = update
    return seen


def _spoil(chunk):
    """A hook that turns the gradient of a layer's weight into NaN, and with it that of nothing else."""
    last = chunk.module.decoder.layers[-1]
    return last.mlp.router.weight.register_hook(lambda grad: grad * float("nan"))


def reference_job(folder: Path, config, args) -> dict:
    """{micro batch of the reference: (its log-probs, its forward passes)}."""
    from verl import DataProto

    worker, tensors = start_worker(folder, config, role="ref")
    passes, found = [], {}
    worker.ref_module[0].register_forward_pre_hook(lambda *_: passes.append(1))
    for size in (1, 2, 8):
        worker.config.ref.log_prob_micro_batch_size_per_gpu = size
        passes.clear()
        output = worker.compute_ref_log_prob(DataProto.from_dict(dict(tensors)))
        found[size] = output.batch["ref_log_prob"], len(passes)
    return found
