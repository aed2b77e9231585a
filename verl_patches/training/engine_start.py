"""Start the training engine of line a3 in a worker: MindSpeed, then Megatron, then verl's groups.

    prepare(config)   before Megatron is imported: MindSpeed-LLM's adaptor, which reads features from the command line
    start(config)     in the worker: arguments by upstream's own parsers and validators, process groups, identities

Facts (MindSpeed-LLM 2.0.0): importing the package patches Megatron, by sys.argv as it is then
(mindspeed_llm/__init__.py, tasks/megatron_adaptor.py); "--raylet-name" in it, which Ray's workers have, would switch on
patches of torch.distributed that are for another system. So sys.argv is ours while it runs. It also replaces
torch.compile for good; vLLM shares the process, so it is put back: Megatron's own functions were decorated by then.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import importlib
import io
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import read_config
from verl_patches.model.mindspeed.arguments import arguments_of
from verl_patches.patching import engine
from verl_patches.platform.npu.visible_die import check_visible_die
from verl_patches.training.engine_arguments import explain

log = logging.getLogger(__name__)

_features: Namespace | None = None  # what the adaptor read in this process
# What validators may change of what was asked for: arguments that they turn from text into what modules read
_PARSED_FURTHER = {"num_layer_list"}


def prepare(config: Any) -> None:
    """Run MindSpeed-LLM's adaptor with the features that `config` asks for, once in a process, before Megatron.

    Raises ConfigError where a key is refused, where Megatron was imported first, or for a second, different call.
    """
    global _features
    words = arguments_of(explain(config))
    if _features is not None:
        _same_features(words)
        return
    early = [name for name in ("megatron.core", "megatron.training") if name in sys.modules]
    if early:
        raise ConfigError(
            f"MindSpeed must patch Megatron before anything else imports it, but {early[0]} is imported already: "
            "call verl_patches.training.engine_start.prepare(config) first in the process"
        )
    compile_of_torch = torch.compile
    with _command_line(words), _quiet("MindSpeed-LLM's adaptor"):
        importlib.import_module("mindspeed_llm")
        _features = _read_features()
    torch.compile = compile_of_torch


def start(config: Any) -> Namespace:
    """Make this rank's training engine as `config` (verl's actor_rollout_ref section with `recipe`) says.

    Needs `prepare`, and RANK and WORLD_SIZE in the environment; starts torch.distributed if verl has not. Idempotent
    for one configuration. Returns Megatron's arguments. Raises ConfigError with upstream's own words where a parser or
    validator refuses, or where a validator changes a value that was asked for; PatchError where MindSpeed went over
    one of our rows.
    """
    if _features is None:
        prepare(config)
    section = config.actor_rollout_ref if "actor_rollout_ref" in config else config
    words = arguments_of(explain(section, read_hf_config(section)))
    _same_features(words)
    global_vars = importlib.import_module("megatron.training.global_vars")
    if global_vars._GLOBAL_ARGS is not None:
        return global_vars.get_args()
    if engine.current().switches.platform == "npu":
        check_visible_die(torch.npu.device_count())
    _start_distributed(section.recipe.train.collective_timeout_minutes)
    args = _arguments(words)
    if section.recipe.dtype == "fp32":
        args.bf16, args.params_dtype = False, torch.float32
    global_vars.set_args(args)
    _start_groups(args)
    check_rows()
    return args


def read_hf_config(section: Any) -> Mapping[str, Any]:
    """config.json of `model.path` as training reads it, with verl's `override_config.model_config` over it."""
    from verl.utils.fs import copy_to_local

    changes = section.model.get("override_config", {}).get("model_config", {})
    return {**read_config(copy_to_local(section.model.path)), **changes}


def check_rows() -> None:
    """PatchError where MindSpeed's own patches went over one of our rows."""
    try:
        found = engine.current()
    except engine.PatchError:
        return  # a tool that runs without the prelude has no rows to lose
    lost = [f"{row['id']} at {row['target']}: {row['reason']}"
            for row in found.status() if row["state"] == "overridden"]
    if lost:
        raise engine.PatchError("after MindSpeed's start these rows are no longer in place:\n  " + "\n  ".join(lost))


def _start_distributed(timeout_minutes: int) -> None:
    if not torch.distributed.is_initialized():  # as verl/workers/megatron_workers.py:86, which then finds it done
        torch.distributed.init_process_group(backend="nccl", timeout=datetime.timedelta(minutes=timeout_minutes))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    world, said = torch.distributed.get_world_size(), os.environ.get("WORLD_SIZE")
    if str(world) != said:
        raise ConfigError(f"WORLD_SIZE is {said}, but torch.distributed has {world} ranks; Megatron reads the former")


def _start_groups(args: Namespace) -> None:
    from megatron.core import parallel_state

    with _quiet("Megatron's process groups"):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
        )


def _arguments(words: list[str]) -> Namespace:
    """`words` through Megatron's and MindSpeed-LLM's parser and validators, and MindSpeed's own rules."""
    from megatron.training import arguments

    with _command_line(words), _quiet("Megatron's arguments"):
        args = arguments.parse_args()
        asked = _asked(words, args)
        arguments.validate_args(args)
        _mindspeed_rules(args)
    changed = [f"{name}: asked {value!r}, got {getattr(args, name, None)!r}" for name, value in asked.items()
               if getattr(args, name, None) != value and name not in _PARSED_FURTHER]
    if changed:
        raise ConfigError("upstream's validators changed what the configuration asks for:\n  " + "\n  ".join(changed))
    return args


def _asked(words: list[str], args: Namespace) -> dict[str, Any]:
    """The parsed values of the arguments in `words` that are named as their attribute is."""
    names = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    return {name: copy.copy(value) for name, value in vars(args).items() if name in names}


def _mindspeed_rules(args: Namespace) -> None:
    """MindSpeed's validator, which MindSpeed-LLM leaves out; what its parser alone knows gets its defaults."""
    from mindspeed import arguments
    from mindspeed_llm.tasks.megatron_adaptor import MegatronAdaptation

    dummy = MegatronAdaptation._patch_info_collection["mindspeed.arguments.process_args"]
    defaults = dummy.orig_func(ArgumentParser()).parse_args([])
    arguments.validate_args_wrapper(lambda checked, _: checked)(Namespace(**{**vars(defaults), **vars(args)}))


def _read_features() -> Namespace:
    from mindspeed_llm.tasks.megatron_adaptor import MegatronAdaptation

    return MegatronAdaptation.get_args()


def _same_features(words: list[str]) -> None:
    """ConfigError where `words` ask for other features than the adaptor patched Megatron for."""
    with _command_line(words):
        now = vars(_read_features())
    prepared = vars(_features)
    mixed = [name for name in now if name in _decided_by_adaptor() and now[name] != prepared[name]]
    if mixed:
        raise ConfigError(
            "this process was prepared for another configuration: "
            + ", ".join(f"{name} {prepared[name]!r}, now {now[name]!r}" for name in mixed)
        )


def _decided_by_adaptor() -> set[str]:
    """Arguments that the adaptor branches on and that our table sets (mindspeed_llm/tasks/megatron_adaptor.py)."""
    return {"moe_tp_extend_ep", "moe_permutation_async_comm", "moe_token_dispatcher_type", "moe_alltoall_overlap_comm",
            "use_fused_moe_token_permute_and_unpermute", "swap_optimizer"}  # fmt: skip


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    kept, sys.argv = sys.argv, ["verl_patches", *words]
    try:
        yield
    finally:
        sys.argv = kept


@contextlib.contextmanager
def _quiet(what: str) -> Iterator[None]:
    """Send what upstream prints to the log, and turn its ways of refusing into ConfigError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    except engine.PatchError:
        raise
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        lines = printed.getvalue().strip().splitlines()
        said = lines[-1] if isinstance(error, SystemExit) and lines else str(error)
        raise ConfigError(f"{what}: upstream refuses: {said}") from error
    finally:
        log.debug("%s:\n%s", what, printed.getvalue())
