"""Start a rank of a line a3 test: the engine with our patches, as in a worker, and then the test's function."""

import dataclasses
import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tests.ranks import init_group
from tests.runs import worker_section
from verl_patches import catalog
from verl_patches.emulation import rows as cpu_rows
from verl_patches.patching import engine
from verl_patches.patching.switches import switches_from_environment
from verl_patches.run.compose import compose
from verl_patches.spec import Trees, run_from_config

# MindSpeed goes over Tensor.type itself; emulation/rows.py has this line's stand-in
_LEFT_OUT_ROWS = {"platform.torch_tensor_type"}
_WORKER_ROWS = {
    "update.recipe_by_default",
    "update.recipe_worker",
    "update.recipe_critic",
    "update.critic_gradients",
    "reward.models",
    "update.routing_samples",
    "update.routing_replay_mindspeed",
    "update.skip_bad_steps",
    "update.dynamic_batches",
    "update.dynamic_split",
    "update.mini_batches",
    "update.sample_weights",
    "model.family_config",
    "model.load_hf",
    "model.train_dtype",
    "model.optimizer_dtype",
}
_ACTOR = "actor_rollout_ref.actor.megatron."
# name -> ranks, overrides of the tiny configuration
LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "tp2_extends_ep": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "split": "tp_extend_ep"}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "pp2_uneven": (2, {"pipeline_model_parallel_size": 2, "layers": [1, 3]}),
    "tp2_ep2": (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "split": "tp_extend_ep"}),
}
_CP2 = {"context_parallel_size": 2}
CONTEXT_PARALLEL_LAYOUTS = {  # context parallel, which takes packed sequences only
    "cp2_ep2": (2, {"expert_model_parallel_size": 2, **_CP2}),
    "cp2_tp2_ep4": (4, {**LAYOUTS["tp2_ep2"][1], **_CP2}),
    "cp2_pp2": (4, {**LAYOUTS["pp2_uneven"][1], **_CP2}),
}


def engine_config(model: Path, verl: Path, ranks: int, sizes: dict, dtype: str) -> DictConfig:
    """Return verl's actor_rollout_ref section of a run of line a3 on platform cpu, with the facts of the run."""
    sizes = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, **sizes}
    layers, split, more = sizes.pop("layers", None), sizes.pop("split", "etp"), sizes.pop("more", [])
    overrides = [f"recipe.train.{key}={value}" for key, value in sizes.pop("train", {}).items()]
    overrides += [f"{_ACTOR}{key}={value}" for key, value in sizes.items()]
    overrides += [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.n_gpus_per_node={ranks}",
        "recipe.line=a3",
        f"recipe.dtype={dtype}",
        f"recipe.train.expert_split={split}",
        f"recipe.train.layers_per_stage={layers or 'null'}",
        *more,
    ]
    return worker_section(compose("deepseekv3_tiny_cpu", overrides, lambda platform: rows(), Trees(verl=verl)))


def rows():
    """Return the patches of this line that a rank without verl's loop needs."""
    shared = [row for row in (*catalog.PACKAGE_STUBS, *cpu_rows.TORCH, *cpu_rows.VERL) if row.id not in _LEFT_OUT_ROWS]
    shared += [
        row for row in (*catalog.CONTROLLER, *catalog.MODEL, *catalog.UPDATE, *catalog.REWARD) if row.id in _WORKER_ROWS
    ]
    shared += catalog.LOG_PROB
    shared = [dataclasses.replace(row, lines=frozenset({"a3"})) for row in shared]
    return (*catalog.MINDSPEED, *cpu_rows.NPU, *shared)


def run(job: str, config: Any, *arguments: Any) -> Any:
    """Start the engine and return what "module:function" returns for (*arguments, Megatron's arguments).

    config: verl's actor_rollout_ref section with the facts of the run.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the launcher does; Megatron's validator asks for it
    engine.start_engine(rows(), switches_from_environment()).apply()
    from verl_patches.model.mindspeed import start

    start.prepare(config)
    init_group("nccl")
    args = start.start(config)
    return pkgutil.resolve_name(job)(*arguments, args)


def arguments(cases: dict[str, dict], early: str | None = None) -> dict | str:
    """Return {case: Megatron's arguments, or the error}; with `early`, the error of `prepare` after that import.

    A case is {"world_size", "config" (the section of a worker), "hf" (config.json)}; the process is prepared for the
    case called base.
    """
    engine.start_engine(rows(), switches_from_environment()).apply()
    import torch

    from verl_patches.errors import ConfigError
    from verl_patches.model.mindspeed import start
    from verl_patches.model.mindspeed.arguments import command_line_arguments, engine_settings

    before = {"compile": torch.compile, "argv": sys.argv}
    if early is not None:
        importlib.import_module(early)
        try:
            return start.prepare(cases["base"]["config"])
        except ConfigError as error:
            return str(error)
    start.prepare(cases["base"]["config"])
    found = {"compile_is_torchs": torch.compile is before["compile"], "argv_is_ours": sys.argv is before["argv"]}
    for name, case in cases.items():
        os.environ.update(WORLD_SIZE=str(case["world_size"]), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
        try:
            words = command_line_arguments(
                engine_settings(case["config"], run_from_config(case["config"]).recipe, case["hf"])
            )
            args = start._parse_arguments(words)
            found[name] = {key: value for key, value in vars(args).items() if isinstance(value, (int, float, str))}
        except ConfigError as error:
            found[name] = str(error)
    return found
