"""Start the training engine of line a3 in a worker: MindSpeed, then Megatron, then verl's groups.

    prepare(section)  before Megatron is imported: MindSpeed-LLM's adaptor, which reads features from the command line
    start(section)    in the worker: arguments by upstream's own parsers and validators, process groups
    row providers     of verl 54c9b736's worker and actor: start, optimizer, learning-rate schedule

Facts (MindSpeed-LLM 2.0.0): importing the package patches Megatron by sys.argv (mindspeed_llm/__init__.py,
tasks/megatron_adaptor.py); "--raylet-name" in it, which Ray's workers have, would switch on patches of
torch.distributed that are for another system. So sys.argv is replaced while the adaptor runs. It also replaces
torch.compile; vLLM shares the process, so that is restored: Megatron's own functions were decorated by then.
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
from verl_patches.model.mindspeed.arguments import arguments_of, explain
from verl_patches.patching import engine
from verl_patches.platform import as_npu
from verl_patches.platform.npu import VISIBLE, check_visible_die
from verl_patches.platform.npu.cores import bind
from verl_patches.platform.npu.groups import small_groups_mib
from verl_patches.spec import run_of

log = logging.getLogger(__name__)

prepared: Current[bool] = Current(False)  # whether the adaptor ran in this process
_PARSED_FURTHER = {"num_layer_list"}  # validators turn it from text into what modules read


def prepare(section: Any) -> None:
    """Run MindSpeed-LLM's adaptor with the features that `section` requires, once in a process, before Megatron.

    section: verl's actor_rollout_ref section with the facts of the run.

    Raises ConfigError where a key is refused, or where Megatron was imported first.
    """
    if prepared.value:
        return
    early = [name for name in ("megatron.core", "megatron.training") if name in sys.modules]
    if early:
        raise ConfigError(
            f"MindSpeed must patch Megatron before anything else imports it, but {early[0]} is imported already: "
            "call verl_patches.model.mindspeed.start.prepare(section) first in the process"
        )
    words, compile_of_torch = arguments_of(explain(section, run_of(section).recipe)), torch.compile
    with _command_line(words), _quiet("MindSpeed-LLM's adaptor"):
        importlib.import_module("mindspeed_llm")
    prepared.value, torch.compile = True, compile_of_torch


def start(section: Any) -> Namespace:
    """Make this rank's training engine as `section` (verl's actor_rollout_ref with the facts of the run) says.

    Needs `prepare`, and RANK and WORLD_SIZE in the environment; starts torch.distributed if verl has not. A process has
    one configuration: a second call changes nothing. Returns Megatron's arguments. Raises ConfigError with upstream's
    own message where a parser or validator refuses, or where a validator changes a value of the configuration, and
    PatchError where patches of MindSpeed replaced one of ours.
    """
    prepare(section)
    recipe = run_of(section).recipe
    words = arguments_of(explain(section, recipe, read_hf_config(section)))
    global_vars = importlib.import_module("megatron.training.global_vars")
    if global_vars._GLOBAL_ARGS is not None:
        recompute_own_stage(section)
        return global_vars.get_args()
    if as_npu(engine.current().switches.platform):
        check_visible_die(torch.npu.device_count())
        if engine.is_on("update.bind_cores"):
            shown = logging.WARNING if engine.current().switches.platform == "npu" else logging.INFO
            log.log(shown, bind(os.environ.get(VISIBLE, "")))
        small_groups_mib.value = recipe.hccl.small_groups_mib
    _start_distributed(recipe.train.collective_timeout_minutes)
    args = _arguments(words)
    if recipe.dtype == "fp32":
        args.bf16, args.params_dtype = False, torch.float32
    args.variable_seq_lengths = True  # validators forbid it with context parallelism, as their own batches are cut
    global_vars.set_args(args)
    _start_groups(args)
    recompute_own_stage(section)
    check_rows()
    return args


def check_rows() -> None:
    """PatchError where MindSpeed's own patches replaced one of ours."""
    replaced = [row for row in engine.current().status() if row["state"] == "overridden"]
    lost = [f"{row['id']} at {row['target']}: {row['reason']}" for row in replaced]
    if lost:
        raise engine.PatchError("After MindSpeed's start these patches are no longer in place:\n  " + "\n  ".join(lost))


def read_hf_config(section: Any) -> Mapping[str, Any]:
    """config.json of `model.path` as training reads it, with verl's `override_config.model_config` over it."""
    from verl.utils.fs import copy_to_local

    changes = section.model.get("override_config", {}).get("model_config", {})
    return {**read_config(copy_to_local(section.model.path)), **changes}


def _start_distributed(timeout_minutes: int) -> None:
    # as verl.workers.megatron_workers.ActorRolloutRefWorker.__init__, which then finds it done
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend="nccl", timeout=datetime.timedelta(minutes=timeout_minutes))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def _start_groups(args: Namespace) -> None:
    from megatron.core import parallel_state

    sizes = [f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")]
    with _quiet("Megatron's process groups"):
        names = *sizes, "distributed_timeout_minutes"
        parallel_state.initialize_model_parallel(**{name: getattr(args, name) for name in names})


def recompute_own_stage(section: Any) -> None:
    """Where recomputed layers are listed by stage, put this rank's number into Megatron's arguments and `section`.

    verl's worker of that section reads it there
    (verl.single_controller.base.megatron.worker.MegatronWorker._init_hf_config_and_tf_config).
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    kwargs: Any = section.model.get("gradient_checkpointing_kwargs") or {}
    if OmegaConf.is_list(layers := kwargs.get("activations_checkpoint_num_layers")):
        number = layers[parallel_state.get_pipeline_model_parallel_rank()]
        kwargs.activations_checkpoint_num_layers = get_args().recompute_num_layers = number


def _arguments(words: list[str]) -> Namespace:
    """`words` through Megatron's and MindSpeed-LLM's parser and validators, and MindSpeed's own rules."""
    from megatron.training import arguments

    with _command_line(words), _quiet("Megatron's arguments"):
        args = arguments.parse_args()
        requested = _requested(words, args)
        arguments.validate_args(args)
        _mindspeed_rules(args)
    changed = [
        f"{name}: requested {value!r}, got {getattr(args, name, None)!r}"
        for name, value in requested.items()
        if getattr(args, name, None) != value and name not in _PARSED_FURTHER
    ]
    if changed:
        raise ConfigError("upstream's validators changed values of the configuration:\n  " + "\n  ".join(changed))
    return args


def _requested(words: list[str], args: Namespace) -> dict[str, Any]:
    """The parsed values of the arguments in `words` that are named as their attribute is."""
    names = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    return {name: copy.copy(value) for name, value in vars(args).items() if name in names}


def _mindspeed_rules(args: Namespace) -> None:
    """MindSpeed's validator, which MindSpeed-LLM does not call; what only its parser knows gets its defaults."""
    from mindspeed import arguments
    from mindspeed_llm.tasks.megatron_adaptor import MegatronAdaptation

    dummy = MegatronAdaptation._patch_info_collection["mindspeed.arguments.process_args"]
    defaults = dummy.orig_func(ArgumentParser()).parse_args([])
    arguments.validate_args_wrapper(lambda checked, _: checked)(Namespace(**{**vars(defaults), **vars(args)}))


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, ["verl_patches", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _quiet(what: str) -> Iterator[None]:
    """Send what upstream prints to the log, and turn its errors into ConfigError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    except engine.PatchError:
        raise
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        lines = printed.getvalue().strip().splitlines()
        message = lines[-1] if isinstance(error, SystemExit) and lines else str(error)
        raise ConfigError(f"{what}: upstream refuses: {message}") from error
    finally:
        log.debug("%s:\n%s", what, printed.getvalue())


def optimizer_config_from_arguments(original: Callable) -> Callable:
    """Row provider for verl's `init_megatron_optim_config`: every field that Megatron's arguments have, from them.

    But for what verl hands over: Megatron's arguments are the actor's.
    """

    @functools.wraps(original)
    def config(optim_config: Any) -> Any:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.training import get_args

        args = get_args()
        names = (field.name for field in dataclasses.fields(OptimizerConfig))
        given = {name: getattr(args, name) for name in names if hasattr(args, name)}
        own = {name: optim_config[name] for name in ("lr", "clip_grad", "weight_decay")}  # the critic has others
        return OptimizerConfig(**{**given, **{name: value for name, value in own.items() if value is not None}})

    return config


def lr_schedule_of(actor: Any) -> Any:
    """Megatron's learning-rate schedule of verl's actor, one object for its lifetime; sets the first step's rate."""
    from megatron.training.training import get_optimizer_param_scheduler

    if not hasattr(actor, "lr_schedule"):
        actor.lr_schedule = get_optimizer_param_scheduler(actor.actor_optimizer)
    return actor.lr_schedule


def with_lr_schedule(update_policy: Callable) -> Callable:
    """Row provider for MegatronPPOActor.update_policy: Megatron's own scheduler, one step per call."""

    @functools.wraps(update_policy)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        schedule = lr_schedule_of(self)
        metrics = update_policy(self, *args, **kwargs)
        schedule.step(increment=get_args().global_batch_size)  # it counts samples
        return metrics

    return update
