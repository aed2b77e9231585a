"""Check for each patch of verl's trainer and workers whether its effect is there; run under the prelude."""

from types import SimpleNamespace

import ray.cloudpickle
import tensordict
import torch
import torch._dynamo.config
import verl.trainer.ppo.ray_trainer as ray_trainer
import verl.utils.megatron.optimizer as optimizer
import verl.workers.actor.megatron_actor as megatron_actor
import verl.workers.megatron_workers as workers
import verl.workers.sharding_manager.megatron_vllm as sharding
from verl.utils.tracking import Tracking

from verl_patches.trainer import run
from verl_patches.worker import recipe_worker
from verl_patches.worker.sharding import RecipeShardingManager
from verl_patches.worker.value_worker import RecipeCriticWorker


def works(probe):
    try:
        return bool(probe())
    except Exception:
        return False


def log_reaches_the_run():
    steps, tracking = [], object.__new__(Tracking)
    tracking.logger = {}
    active = SimpleNamespace(after_step=lambda data, step, log: steps.append(step) or log(data))
    with run.current_run.set(active):
        tracking.log({"critic/score/mean": 0.5}, step=7)
    return steps == [7]


def validation_has_pass_at_k():
    found = ray_trainer.process_validation_metrics(["a", "a"], ["p", "p"], {"reward": [1.0, 0.0]})
    return found["a"]["reward"]["pass@2"] == 1


def empty_cache_is_left_to_the_schedule():
    """Return whether verl's modules have a stand-in for torch, which tests/memory/test_scheduler.py tests."""
    seen = [module.torch for module in (workers, megatron_actor)]
    return all(each is not torch and each.Tensor is torch.Tensor for each in seen)


def optimizer_takes_the_models_dtype():
    config = SimpleNamespace(bf16=True, params_dtype=torch.bfloat16)
    model = [SimpleNamespace(config=SimpleNamespace(bf16=False, params_dtype=torch.float32))]
    try:
        optimizer.get_megatron_optimizer(model, config)
    except (AttributeError, TypeError):
        pass
    return config.params_dtype is torch.float32


def effects():
    """Return {patch id: whether its effect is there}."""
    actor = workers.ActorRolloutRefWorker
    return {
        "update.recipe_worker": issubclass(actor, recipe_worker.RecipeWorker),
        "update.recipe_critic": issubclass(workers.CriticWorker, RecipeCriticWorker),
        "update.log_with_run": works(log_reaches_the_run),
        "platform.tensordict_cuda": works(lambda: tensordict.TensorDict({"a": torch.ones(1)}, [1]).cuda() is not None),
        "platform.pickle_torch_config": works(lambda: ray.cloudpickle.dumps(torch._dynamo.config)),
        "update.sharding_manager": issubclass(sharding.MegatronVLLMShardingManager, RecipeShardingManager),
        "model.optimizer_dtype": works(optimizer_takes_the_models_dtype),
        "reward.pass_at_k": works(validation_has_pass_at_k),
        "memory.empty_cache": works(empty_cache_is_left_to_the_schedule),
    }
