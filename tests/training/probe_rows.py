"""Run under the prelude: for each row, is its effect there? Prints {row id: true | false} as JSON."""

from verl_patches import prelude_patch  # noqa: F401

# isort: split
import json
from types import SimpleNamespace

import ray.cloudpickle
import tensordict
import torch
import torch._dynamo.config
import verl.single_controller.ray.base as ray_base
import verl.trainer.ppo.ray_trainer as ray_trainer
import verl.utils.megatron.optimizer as optimizer
import verl.workers.actor.megatron_actor as megatron_actor
import verl.workers.megatron_workers as workers
import verl.workers.sharding_manager.megatron_vllm as sharding
from omegaconf import OmegaConf
from verl import DataProto
from verl.utils.tracking import Tracking

from verl_patches.comm import dispatch, starts
from verl_patches.config.recipe import Recipe
from verl_patches.memory import conduct, moves, phase_clock, swap_optimizer
from verl_patches.training import kept_micro_batches, run


def works(probe):
    try:
        return bool(probe())
    except Exception:
        return False


def fit_proves_first():
    trainer = ray_trainer.RayPPOTrainer.__new__(ray_trainer.RayPPOTrainer)
    started = []
    run.Run, original = (lambda t: started.append(t) or 1 / 0), run.Run
    trainer.config = SimpleNamespace(get=lambda key: {"recipe": 1}[key], trainer=None)
    try:
        trainer.fit()
    except (ZeroDivisionError, AttributeError):
        pass
    run.Run = original
    return started


def log_reaches_the_run():
    seen = []
    run._active = SimpleNamespace(after_step=lambda data, step: seen.append(step) or data)
    tracking = Tracking.__new__(Tracking)
    tracking.logger = {}
    tracking.log({"critic/score/mean": 0.5}, step=7)
    run._active = None
    return seen == [7]


def actor_splits_as_planned():
    from verl.workers.actor import megatron_actor

    batch = tensordict.TensorDict({"attention_mask": torch.ones(3, 2, dtype=torch.int64)}, [3])
    with kept_micro_batches.following([[[2], [0, 1]]], [2, 2, 2]):
        return megatron_actor.rearrange_micro_batches(batch=batch, max_token_len=100)[1] == [[2], [0, 1]]


def calls_are_told():
    group = SimpleNamespace(_workers=[1, 2], _execute_remote_single_worker=lambda worker, *_: worker)
    dispatch.take_calls()
    assert ray_base.RayWorkerGroup.execute_all_async(group, "f", "x") == [1, 2]
    return dispatch.take_calls()


def starts_are_noted():
    starts.take()
    worker = workers.ActorRolloutRefWorker.__new__(workers.ActorRolloutRefWorker)
    try:
        worker.load_pretrained_model("nowhere")
    except Exception:
        pass
    return [name for name, _ in starts.take()] == ["load_pretrained_model"]


def metrics_have_the_delta():
    ones = torch.ones(2, 3)
    batch = DataProto.from_dict({
        "token_level_scores": ones, "token_level_rewards": ones, "advantages": ones, "returns": ones,
        "responses": ones, "attention_mask": torch.ones(2, 5), "response_mask": ones, "old_log_probs": -ones,
        "rollout_log_probs": -1.5 * ones})
    found = ray_trainer.compute_data_metrics(batch=batch, use_critic=False)
    return found["recipe/logprob_delta_mean"] == 0.5


def sync_mode_reaches_the_manager():
    recipe = OmegaConf.structured(Recipe)
    recipe.weight_sync.enabled = False
    sizes = {f"{name}_model_parallel_size": 1 for name in ("tensor", "expert", "pipeline")}
    megatron = {**sizes, "context_parallel_size": 1, "expert_tensor_parallel_size": 1,
                "virtual_pipeline_model_parallel_size": None}
    worker = SimpleNamespace(config=OmegaConf.create({
        "recipe": recipe, "actor": {"megatron": megatron}, "rollout": {"tensor_model_parallel_size": 1}}))
    build = workers.ActorRolloutRefWorker._build_rollout
    manager = SimpleNamespace()
    build.__closure__[0].cell_contents = lambda *a, **k: (None, manager)
    build(worker)
    return manager.weight_sync_enabled is False and manager.reshard_settings.rollout.world_size == 1


def offload_times():
    names = ("load_megatron_model_to_gpu", "offload_megatron_model_to_cpu", "load_megatron_optimizer",
             "offload_megatron_optimizer")
    for name in names:
        phase_clock.take()
        try:
            getattr(workers, name)([])
        except AttributeError:  # no optimizer in an empty list; what counts is that the call is timed
            pass
        yield f"memory.time_{name}", "offload" in phase_clock.take()


def moves_are_counted():
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    adam.step()
    adam.zero_grad()
    megatron = SimpleNamespace(optimizer=adam)
    moves.take()
    for name, function, what in (("offload_model", "offload_megatron_model_to_cpu", [model]),
                                 ("load_model", "load_megatron_model_to_gpu", [model]),
                                 ("offload_optimizer", "offload_megatron_optimizer", megatron),
                                 ("load_optimizer", "load_megatron_optimizer", megatron)):
        getattr(workers, function)(what)
        yield f"memory.{name}", bool(moves.take())


def worker_swaps_the_optimizer():
    asked = []
    recipe = SimpleNamespace(dtype="fp32", train=SimpleNamespace(swap_optimizer=True, swap_optimizer_times=3))
    swap_optimizer.swap_optimizer, original = (lambda *of: asked.append(of)), swap_optimizer.swap_optimizer
    worker = SimpleNamespace(config={"recipe": recipe}, dtype=None)
    build = workers.ActorRolloutRefWorker._build_model_optimizer
    while hasattr(build, "__wrapped__"):  # verl's own needs a model
        inner, build = build, build.__wrapped__
    cell = next(c for c in inner.__closure__ if c.cell_contents is build)
    cell.cell_contents = lambda self: ("chunks", "optimizer", "hf", "config")
    workers.ActorRolloutRefWorker._build_model_optimizer(worker)
    cell.cell_contents, swap_optimizer.swap_optimizer = build, original
    return asked == [("optimizer", 3)]


def checkpoint_asks_for_the_optimizer(name):
    seen = []

    class Worker:
        _is_offload_param = _is_actor = True

        def __getattr__(self, name):
            seen.append(name)
            raise AttributeError(name)

    try:
        getattr(workers.ActorRolloutRefWorker, f"{name}_checkpoint")(Worker(), "folder")
    except AttributeError:
        pass
    return seen == ["actor_optimizer"]


def verls_trims_are_left_to_the_order():
    calls, conductor = [], conduct.current()
    torch.cuda.empty_cache, original = (lambda: calls.append("trim")), torch.cuda.empty_cache
    for name, module in (("worker", workers), ("actor", megatron_actor), ("sleep", sharding)):
        calls.clear()
        conduct.keep(object())
        module.torch.cuda.empty_cache()
        conduct.keep(None)
        left = not calls
        module.torch.cuda.empty_cache()
        same = module.torch.Tensor is torch.Tensor and module.torch.cuda.current_device == torch.cuda.current_device
        yield f"memory.trims_{name}", left and calls == ["trim"] and same
    torch.cuda.empty_cache = original
    conduct.keep(conductor)


def init_makes_the_conductor():
    init = workers.ActorRolloutRefWorker.init_model
    while hasattr(init, "__wrapped__"):  # verl's own builds models
        inner, init = init, init.__wrapped__
    cell = next(c for c in inner.__closure__ if c.cell_contents is init)
    cell.cell_contents = lambda self: None
    side = {"megatron": {"param_offload": True, "optimizer_offload": True}}
    recipe = SimpleNamespace(line="pypi", platform="cpu", memory=SimpleNamespace(ledger="off"),
                             train=SimpleNamespace(skip_old_log_prob=False), weight_sync=SimpleNamespace(enabled=True))
    config = OmegaConf.create({"actor": side, "ref": side, "rollout": {"enforce_eager": True}})
    worker = SimpleNamespace(_is_actor=True, _is_ref=False, actor_module=[object()], actor_optimizer=object())
    worker.config = SimpleNamespace(actor=config.actor, ref=config.ref, rollout=config.rollout,
                                    get={"recipe": recipe}.get)
    workers.ActorRolloutRefWorker.init_model(worker)
    cell.cell_contents = init
    return conduct.moved_here(worker.actor_module) and conduct.moved_here(worker.actor_optimizer)


def switch_leaves_a_sync_out():
    manager = SimpleNamespace(weight_sync_enabled=False, weights_synced_once=True,
                              inference_engine=SimpleNamespace(wake_up=lambda tags: tags))
    return sharding.MegatronVLLMShardingManager.__enter__(manager) == ["weights"]


def resharder_takes_the_place_of_verls_path():
    seen, model = [], torch.nn.Linear(1, 1)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(
        model_runner=SimpleNamespace(model=model))))
    resharder = SimpleNamespace(sync=lambda model: seen.append(model) or SimpleNamespace(peak_extra_bytes=0))
    manager = SimpleNamespace(reshard_settings=object(), resharder=resharder, actor_module=[torch.nn.Linear(1, 1)],
                              inference_engine=SimpleNamespace(wake_up=lambda tags: seen.append(tags),
                                                               llm_engine=SimpleNamespace(model_executor=executor)))
    sharding.MegatronVLLMShardingManager.__enter__(manager)  # verl's own path asks this manager for more, and raises
    return seen == [["weights"], model]


def worker_takes_the_asked_dtype():
    worker = SimpleNamespace(config={"recipe": SimpleNamespace(dtype="fp32")}, dtype=None)
    try:
        workers.ActorRolloutRefWorker._build_model_optimizer(worker, None, None, None, None)
    except (AttributeError, TypeError):
        pass
    return worker.dtype is torch.float32


def optimizer_takes_the_models_dtype():
    config = SimpleNamespace(bf16=True, params_dtype=torch.bfloat16)
    model = [SimpleNamespace(config=SimpleNamespace(bf16=False, params_dtype=torch.float32))]
    try:
        optimizer.get_megatron_optimizer(model, config)
    except (AttributeError, TypeError):
        pass
    return config.params_dtype is torch.float32


def main():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    actor = workers.ActorRolloutRefWorker
    found = {
        "update.fit_as_run": works(fit_proves_first),
        "update.prove_patches": hasattr(actor, "prove_patches"),
        "update.take_phase_seconds": hasattr(actor, "take_phase_seconds"),
        "update.take_sync_reports": hasattr(actor, "take_sync_reports"),
        "reshard.direct": works(resharder_takes_the_place_of_verls_path),
        "update.log_with_run": works(log_reaches_the_run),
        "logprob.truth_check": works(metrics_have_the_delta),
        "update.sync_mode": works(sync_mode_reaches_the_manager),
        "platform.tensordict_cuda": works(lambda: tensordict.TensorDict({"a": torch.ones(1)}, [1]).cuda() is not None),
        "platform.pickle_torch_config": works(lambda: ray.cloudpickle.dumps(torch._dynamo.config)),
        "update.sync_switch": works(switch_leaves_a_sync_out),
        "model.train_dtype": works(worker_takes_the_asked_dtype),
        "model.optimizer_dtype": works(optimizer_takes_the_models_dtype),
        "update.micro_batches_as_planned": works(actor_splits_as_planned),
        **dict(offload_times()),
        "memory.take_offload": hasattr(actor, "take_offload"),
        "dispatch.put_once": works(calls_are_told), "dispatch.note_starts": works(starts_are_noted),
        "dispatch.take_starts": hasattr(actor, "take_starts"),
        "memory.swap_optimizer": works(worker_swaps_the_optimizer),
        **dict(moves_are_counted()),
        **dict(verls_trims_are_left_to_the_order()),
        "memory.order": works(init_makes_the_conductor),
        **{f"memory.optimizer_at_{name}": works(lambda name=name: checkpoint_asks_for_the_optimizer(name))
           for name in ("save", "load")},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
