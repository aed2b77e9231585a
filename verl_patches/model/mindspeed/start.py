"""Start the training engine of line a3 in a worker: MindSpeed, then Megatron, then verl's groups.

    prepare(section)  before Megatron is imported: MindSpeed-LLM's adaptor, which reads features from the command line
    start(section)    in the worker: arguments by upstream's own parsers and validators, process groups
    other functions   replace or wrap functions of verl 54c9b736's worker and actor: optimizer, learning-rate schedule

Importing MindSpeed-LLM 2.0.0 patches Megatron as sys.argv says (mindspeed_llm/__init__.py, tasks/megatron_adaptor.py).
Ray's workers have "--raylet-name" in it, which would switch on patches of torch.distributed for another system. So
sys.argv is replaced while the adaptor runs. The adaptor also replaces torch.compile. vLLM shares the process, so
torch.compile is restored afterwards, when Megatron's own functions are decorated already.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import functools
import importlib
import io
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from omegaconf import OmegaConf

from verl_patches.current import Current
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import read_config
from verl_patches.model.mindspeed.arguments import command_line_arguments, engine_settings
from verl_patches.patching import engine
from verl_patches.platform import as_npu
from verl_patches.platform.npu import check_visible_die
from verl_patches.platform.npu.groups import small_groups_mib
from verl_patches.spec import run_from_config

log = logging.getLogger(__name__)

adaptor_applied: Current[bool] = Current(False)  # whether the adaptor ran in this process
_CONVERTED_ARGUMENTS = {"num_layer_list"}  # validators convert it from text


def prepare(section: Any) -> None:
    """Run MindSpeed-LLM's adaptor with the features that `section` requires, once in a process, before Megatron.

    section: verl's actor_rollout_ref section with the facts of the run.

    Raises ConfigError where a key is refused, or where Megatron was imported first.
    """
    if adaptor_applied.value:
        return
    early = [name for name in ("megatron.core", "megatron.training") if name in sys.modules]
    if early:
        raise ConfigError(
            f"MindSpeed must patch Megatron before anything else imports it, but {early[0]} is imported already: "
            "call verl_patches.model.mindspeed.start.prepare(section) first in the process"
        )
    words = command_line_arguments(engine_settings(section, run_from_config(section).recipe))
    torch_compile = torch.compile
    with _replaced_argv(words), _redirect_prints("MindSpeed-LLM's adaptor"):
        importlib.import_module("mindspeed_llm")
    adaptor_applied.value, torch.compile = True, torch_compile


def start(section: Any) -> Namespace:
    """Start this rank's training engine from `section`, and return Megatron's arguments.

    section: verl's actor_rollout_ref section with the facts of the run.

    Calls `prepare`; needs RANK and WORLD_SIZE in the environment; starts torch.distributed if verl has not. A process
    has one configuration: a second call does not change it. Raises ConfigError with upstream's own message where a
    parser or validator refuses, or where a validator changes a value of the configuration.
    """
    prepare(section)
    recipe = run_from_config(section).recipe
    words = command_line_arguments(engine_settings(section, recipe, read_hf_config(section)))
    global_vars = importlib.import_module("megatron.training.global_vars")
    if global_vars._GLOBAL_ARGS is not None:
        set_recomputed_layers(section)
        return global_vars.get_args()
    if as_npu(engine.current_engine().switches.platform):
        check_visible_die(torch.npu.device_count())
        small_groups_mib.value = recipe.hccl.small_groups_mib
    _start_distributed(recipe.train.distributed_timeout_minutes)
    args = _parse_arguments(words)
    if recipe.dtype == "fp32":
        args.bf16, args.params_dtype = False, torch.float32
    args.variable_seq_lengths = True  # set here, as validators forbid it with context parallelism
    global_vars.set_args(args)
    _start_groups(args)
    set_recomputed_layers(section)
    return args


def read_hf_config(section: Any) -> Mapping[str, Any]:
    """Return config.json of `model.path` as training reads it, with verl's `override_config.model_config` over it."""
    from verl.utils.fs import copy_to_local

    changes = section.model.get("override_config", {}).get("model_config", {})
    return {**read_config(copy_to_local(section.model.path)), **changes}


def _start_distributed(timeout_minutes: int) -> None:
    # does the same as verl.workers.megatron_workers.ActorRolloutRefWorker.__init__, which then skips it
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend="nccl", timeout=datetime.timedelta(minutes=timeout_minutes))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def _start_groups(args: Namespace) -> None:
    from megatron.core import parallel_state

    sizes = [f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")]
    with _redirect_prints("Megatron's process groups"):
        names = *sizes, "distributed_timeout_minutes"
        parallel_state.initialize_model_parallel(**{name: getattr(args, name) for name in names})


def set_recomputed_layers(section: Any) -> None:
    """Set this stage's number of recomputed layers in Megatron's arguments and `section`, if that lists one a stage.

    verl's worker reads the number from its section
    (verl.single_controller.base.megatron.worker.MegatronWorker._init_hf_config_and_tf_config).
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    kwargs: Any = section.model.get("gradient_checkpointing_kwargs") or {}
    if OmegaConf.is_list(layers := kwargs.get("activations_checkpoint_num_layers")):
        number = layers[parallel_state.get_pipeline_model_parallel_rank()]
        kwargs.activations_checkpoint_num_layers = get_args().recompute_num_layers = number


def _parse_arguments(words: list[str]) -> Namespace:
    """Return `words` parsed and validated by Megatron and MindSpeed-LLM, and validated by MindSpeed."""
    from megatron.training import arguments

    with _replaced_argv(words), _redirect_prints("Megatron's arguments"):
        args = arguments.parse_args()
        names = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
        requested = {name: copy.copy(value) for name, value in vars(args).items() if name in names}
        arguments.validate_args(args)
        _validate_with_mindspeed(args)
    changed = [
        f"{name}: requested {value!r}, got {getattr(args, name, None)!r}"
        for name, value in requested.items()
        if getattr(args, name, None) != value and name not in _CONVERTED_ARGUMENTS
    ]
    if changed:
        raise ConfigError("Megatron's or MindSpeed's validators changed these arguments:\n  " + "\n  ".join(changed))
    return args


def _validate_with_mindspeed(args: Namespace) -> None:
    """Run MindSpeed's validator, which MindSpeed-LLM does not call; arguments that only it knows have defaults."""
    from mindspeed import arguments
    from mindspeed_llm.tasks.megatron_adaptor import MegatronAdaptation

    dummy = MegatronAdaptation._patch_info_collection["mindspeed.arguments.process_args"]
    defaults = dummy.orig_func(ArgumentParser()).parse_args([])
    arguments.validate_args_wrapper(lambda checked, _: checked)(Namespace(**{**vars(defaults), **vars(args)}))


@contextlib.contextmanager
def _replaced_argv(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, ["verl_patches", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _redirect_prints(task: str) -> Iterator[None]:
    """Redirect upstream's prints to the log, and turn its errors into ConfigError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    except engine.PatchError:
        raise
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        lines = printed.getvalue().strip().splitlines()
        message = lines[-1] if isinstance(error, SystemExit) and lines else str(error)
        raise ConfigError(f"{task}: refused by Megatron or MindSpeed: {message}") from error
    finally:
        log.debug("%s:\n%s", task, printed.getvalue())


def optimizer_config_from_arguments(original: Callable) -> Callable:
    """Replace verl's `init_megatron_optim_config`: take every field that Megatron's arguments have from them.

    lr, clip_grad and weight_decay are taken from `optim_config`: Megatron's arguments are those of the actor.
    """

    @functools.wraps(original)
    def config(optim_config: Any) -> Any:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.training import get_args

        args = get_args()
        names = (field.name for field in dataclasses.fields(OptimizerConfig))
        fields = {name: getattr(args, name) for name in names if hasattr(args, name)}
        for name in ("lr", "clip_grad", "weight_decay"):  # the critic's differ from Megatron's arguments
            if optim_config[name] is not None:
                fields[name] = optim_config[name]
        return OptimizerConfig(**fields)

    return config


def actor_lr_schedule(actor: Any) -> Any:
    """Return Megatron's learning-rate schedule of verl's `actor`; the first call makes it and sets the first rate."""
    from megatron.training.training import get_optimizer_param_scheduler

    if not hasattr(actor, "lr_schedule"):
        actor.lr_schedule = get_optimizer_param_scheduler(actor.actor_optimizer)
    return actor.lr_schedule


def step_lr_schedule(update_policy: Callable) -> Callable:
    """Wrap MegatronPPOActor.update_policy so that each call steps Megatron's own learning-rate schedule once."""

    @functools.wraps(update_policy)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        schedule = actor_lr_schedule(self)
        metrics = update_policy(self, *args, **kwargs)
        schedule.step(increment=get_args().global_batch_size)  # the schedule counts samples
        return metrics

    return update
