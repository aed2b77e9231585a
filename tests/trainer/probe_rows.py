"""For each row around verl's trainer and workers, whether its effect is there. Run under the prelude."""

from types import SimpleNamespace
from unittest import mock

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

from verl_patches.batches import micro_batches
from verl_patches.log_probs import on_policy_update
from verl_patches.patching.row import subclass_of
from verl_patches.trainer import dispatch, run
from verl_patches.worker import recipe_worker
from verl_patches.worker import sharding as sharding_manager
from verl_patches.worker.context import context


def works(probe):
    try:
        return bool(probe())
    except Exception:
        return False


def fit_proves_first():
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    started = []
    trainer.config = SimpleNamespace(get=lambda key: {"recipe": 1}[key], trainer=None)
    with mock.patch.object(run, "Run", lambda trainer: started.append(trainer) or 1 / 0):
        try:
            trainer.fit()
        except (ZeroDivisionError, AttributeError):
            return started


def log_reaches_the_run():
    steps, tracking = [], object.__new__(Tracking)
    tracking.logger = {}
    active = SimpleNamespace(after_step=lambda data, step: steps.append(step) or data)
    with run.active_run.set(active):
        tracking.log({"critic/score/mean": 0.5}, step=7)
    return steps == [7]


def actor_splits_as_planned():
    batch = tensordict.TensorDict({"attention_mask": torch.ones(3, 2, dtype=torch.int64)}, [3])
    with micro_batches.following([[[2], [0, 1]]], [2, 2, 2]):
        return megatron_actor.rearrange_micro_batches(batch=batch, max_token_len=100)[1] == [[2], [0, 1]]


def calls_are_counted():
    group = SimpleNamespace(_workers=[1, 2], _execute_remote_single_worker=lambda worker, *_: worker)
    dispatch.take_calls()
    assert ray_base.RayWorkerGroup.execute_all_async(group, "f", "x") == [1, 2]
    return dispatch.take_calls()


def starts_are_noted():
    dispatch.take_starts()
    try:
        object.__new__(workers.ActorRolloutRefWorker).load_pretrained_model("nowhere")
    except Exception:
        pass
    return [name for name, _ in dispatch.take_starts()] == ["load_pretrained_model"]


def metrics_have_the_delta():
    ones, names = torch.ones(2, 3), "token_level_scores token_level_rewards advantages returns responses response_mask"
    tensors = {**dict.fromkeys(names.split(), ones), "attention_mask": torch.ones(2, 5)}
    batch = DataProto.from_dict({**tensors, "old_log_probs": -ones, "rollout_log_probs": -1.5 * ones})
    return ray_trainer.compute_data_metrics(batch=batch, use_critic=False)["recipe/logprob_delta_mean"] == 0.5


class Upstream:
    """Stands for verl's worker under ours; `seen` has the calls that reach it."""

    _is_actor, _is_ref, _is_rollout, _is_offload_param = True, False, False, True

    def __init__(self, config=None, role="actor"):
        self.config, self.seen = config or {}, []

    def __getattr__(self, name):
        if name.startswith("_") or name in ("actor_module", "actor_optimizer", "ref_module"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.seen.append(name)

    def _build_model_optimizer(self, *args, **kwargs):
        self.seen.append(self.dtype)
        return "chunks", "optimizer", "hf", "config"

    def init_model(self):
        self.actor_module, self.actor_optimizer = [object()], object()

    def update_actor(self, data):
        self.seen.append(on_policy_update.current_update.value is not None)


def worker(**recipe):
    """A worker of ours over `Upstream`; the rows that are on in this process say what it does."""
    train = {"skip_old_log_prob": False, "routing_replay": None, "swap_optimizer": False, "swap_optimizer_times": 3}
    train |= {"use_remove_padding": True}
    train |= recipe.pop("train", {})
    settings = {"line": "pypi", "platform": "cpu", "dtype": "fp32", "memory": {"ledger": "off"}, "train": train}
    settings |= {"weight_sync": {"enabled": True}, "expert_load": False, "watch": {"action": "off"}, **recipe}
    side = {"megatron": {"param_offload": True, "optimizer_offload": True}}
    config = OmegaConf.create({"recipe": settings, "actor": side, "ref": side, "rollout": {"enforce_eager": True}})
    return subclass_of(Upstream, recipe_worker.RecipeWorker)(config, "actor")


def build(made):
    """`_build_model_optimizer` without what needs real chunks: the ledger's part and the guard of optimizer steps."""
    made.memory.built = lambda *built: None
    with mock.patch.object(recipe_worker, "StepGuard", lambda *built: None):
        made._build_model_optimizer()


def worker_swaps_the_optimizer():
    swapped, made = [], worker(train={"swap_optimizer": True})
    with mock.patch.object(recipe_worker, "swap_optimizer", lambda *arguments, look: swapped.append(arguments)):
        build(made)
    return swapped == [("optimizer", 3)]


def worker_uses_the_configured_dtype():
    made = worker()
    made.dtype = None
    build(made)
    return made.seen == [torch.float32]


def scheduler_moves_what_the_worker_built():
    made = worker()
    made.init_model()
    scheduler, context().scheduler = context().scheduler, None
    return scheduler is not None and scheduler.moves("optimizer") and made._is_offload_param is False


def empty_cache_is_left_to_the_schedule():
    calls, results = [], set()
    with mock.patch.object(torch.cuda, "empty_cache", lambda: calls.append("empty")):
        for module in (workers, megatron_actor):
            calls.clear()
            context().scheduler = object()
            module.torch.cuda.empty_cache()
            context().scheduler = None
            left = not calls
            module.torch.cuda.empty_cache()
            same = module.torch.Tensor is torch.Tensor and module.torch.cuda.current_device == torch.cuda.current_device
            results.add(left and calls == ["empty"] and same)
    (result,) = results
    return result


A3 = SimpleNamespace(line="a3")


class UpstreamManager:
    """Stands for verl's sharding manager under ours."""

    def __init__(self):
        self.seen, space = [], SimpleNamespace
        self.actor_module = [torch.nn.Linear(1, 1)]
        runner = space(worker=space(model_runner=space(model=torch.nn.Linear(1, 1))))
        self.inference_engine = space(
            wake_up=lambda tags: self.seen.append(*tags),
            weights_written=lambda last: self.seen.append("written"),
            sleep=lambda level: self.seen.append("sleep"),
            llm_engine=space(model_executor=space(driver_worker=runner)),
        )

    def __enter__(self):
        self.seen.append("verl's sync")

    def postprocess_data(self, data):
        return data


def manager(**given):
    made = subclass_of(UpstreamManager, sharding_manager.RecipeShardingManager)()
    vars(made).update(given)
    return made


def switch_leaves_a_sync_out():
    made = manager(settings=A3, sync_enabled=False, synced_once=True)
    made.__enter__()
    ours = issubclass(sharding.MegatronVLLMShardingManager, sharding_manager.RecipeShardingManager)
    return ours and made.seen == ["weights", "kv_cache"]


def resharder_takes_the_place_of_verls_path():
    made = manager(settings=A3)
    made.resharder = SimpleNamespace(sync=lambda model: made.seen.append("ours") or SimpleNamespace(peak_extra_bytes=0))
    made.__enter__()
    return made.seen == ["weights", "ours", "written", "kv_cache"]


def update_goes_by_its_own_log_probs():
    train, off = {"skip_old_log_prob": True}, {"rollout_is": None, "rollout_rs": None}
    made, batch = worker(train=train, rollout_correction=off), {"advantages": torch.ones(1, 2)}
    with mock.patch.object(on_policy_update, "is_metrics_rank", lambda: False):
        made.update_actor(SimpleNamespace(batch=batch))
    return made.seen == [True] and "old_log_probs" in batch


def optimizer_takes_the_models_dtype():
    config = SimpleNamespace(bf16=True, params_dtype=torch.bfloat16)
    model = [SimpleNamespace(config=SimpleNamespace(bf16=False, params_dtype=torch.float32))]
    try:
        optimizer.get_megatron_optimizer(model, config)
    except (AttributeError, TypeError):
        pass
    return config.params_dtype is torch.float32


def effects():
    """{row id: whether its effect is there}."""
    actor = workers.ActorRolloutRefWorker
    return {
        "update.fit_as_run": works(fit_proves_first),
        "update.recipe_worker": issubclass(actor, recipe_worker.RecipeWorker),
        "update.on_policy": works(update_goes_by_its_own_log_probs),
        "reshard.direct": works(resharder_takes_the_place_of_verls_path),
        "update.log_with_run": works(log_reaches_the_run),
        "logprob.truth_check": works(metrics_have_the_delta),
        "platform.tensordict_cuda": works(lambda: tensordict.TensorDict({"a": torch.ones(1)}, [1]).cuda() is not None),
        "platform.pickle_torch_config": works(lambda: ray.cloudpickle.dumps(torch._dynamo.config)),
        "update.sharding_manager": works(switch_leaves_a_sync_out),
        "model.train_dtype": works(worker_uses_the_configured_dtype),
        "model.optimizer_dtype": works(optimizer_takes_the_models_dtype),
        "update.micro_batches_as_planned": works(actor_splits_as_planned),
        "dispatch.put_once": works(calls_are_counted),
        "dispatch.note_starts": works(starts_are_noted),
        "memory.swap_optimizer": works(worker_swaps_the_optimizer),
        "memory.empty_cache": works(empty_cache_is_left_to_the_schedule),
        "memory.order": works(scheduler_moves_what_the_worker_built),
    }
