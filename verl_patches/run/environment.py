"""Derive the environment variables of a run from its configuration, each with its reason and its reader.

The reader is that of `environment:` in configs/upstream.yaml; a variable that is not listed there raises KeyError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_patches.patching.switches import PATCHES_VAR
from verl_patches.platform.npu import INTERFACE_VARIABLES
from verl_patches.platform.npu.machine import ld_preload
from verl_patches.run import hccl
from verl_patches.run.record.loggers import LOGGERS, chosen_loggers
from verl_patches.shared_files import can_write_below
from verl_patches.spec import RunSpec
from verl_patches.upstream.pins import load_pins

# files in a run's folder that its driver reads: the composed configuration, and the facts of the run (RunSpec.text)
CONFIG_FILE, FACTS_FILE = "config.yaml", "facts.json"
REPOSITORY = Path(__file__).resolve().parents[2]
RAY_FOLDER = "ray"  # in a run's temporary folder, which is 0700: Ray makes its own accessible to all users
# variables of the shell that a run does not inherit, because the configuration decides them
DROPPED_VARIABLES = ("RAY_ADDRESS", "RAY_GCS_SERVER_PORT", "RAY_TMPDIR", PATCHES_VAR)


@dataclass(frozen=True)
class Variable:
    """Describe one environment variable of a run.

    where: "workers" (the driver and, by Ray's runtime_env, every worker), "driver" (the driver and a Ray that it
    starts) or "node" (each worker sets it from its node's network, so `value` is a description).
    """

    name: str
    value: str
    reason: str
    where: str = "workers"
    read_by: str = field(kw_only=True)


def environment_variables(run: RunSpec, temp_dir: str | None = None) -> list[Variable]:
    """Return the environment variables of a run.

    temp_dir: the run's folder for sockets and scratch files; None if it does not exist yet.
    """
    variables: dict[str, tuple[str, ...]] = {
        PATCHES_VAR: (run.process_switches.text(), "line, platform and ids of the patches that are on"),
        "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "sequence parallel needs kernels launched in order"),
        "TOKENIZERS_PARALLELISM": ("false", "no thread pools in processes that fork"),
        "VERL_LOGGING_LEVEL": ("WARN", "INFO prints one line for each rank"),
        "VLLM_LOGGING_LEVEL": ("WARNING", "one engine for each rank: INFO lines hide the step table"),
        "RAY_USAGE_STATS_ENABLED": ("0", "nothing leaves the machine"),
        "VLLM_NO_USAGE_STATS": ("1", "nothing leaves the machine; no reporting process"),
    }
    if run.recipe.platform == "cpu":
        variables |= _CPU_VARIABLES
        if run.verl.trainer.nnodes > 1:
            variables["GLOO_SOCKET_IFNAME"] = _socket_variables(run)["GLOO_SOCKET_IFNAME"]
    elif run.as_npu:
        variables |= _npu_variables(run)
    if run.recipe.platform == "npu_emulated":
        graphs = not run.verl.actor_rollout_ref.rollout.enforce_eager
        variables |= _CPU_HOST_VARIABLES
        variables |= dict.fromkeys(INTERFACE_VARIABLES, _CPU_HOST_VARIABLES["GLOO_SOCKET_IFNAME"])
        traced = "graphs are traced as on a device" if graphs else "nothing is compiled"
        variables["TORCHDYNAMO_DISABLE"] = ("0" if graphs else "1", traced)
    variables |= {
        logger.folder[0]: (logger.folder[1].format(run.folder), f"{name} writes into the run's folder")
        for name, logger in {"tensorboard": LOGGERS["tensorboard"], **chosen_loggers(run.verl.trainer.logger)}.items()
        if logger.folder and not (name == "mlflow" and os.environ.get(logger.folder[0]))  # a server of the user's
    }
    variables |= _driver_variables(run, temp_dir)
    pins, line = load_pins(), run.recipe.line
    return [Variable(name, *entry, read_by=pins.read_by(name, line)) for name, entry in variables.items()]


_CPU_HOST_VARIABLES = {  # of the platforms cpu and npu_emulated
    "OMP_NUM_THREADS": ("1", "several ranks share few cores"),
    "GLOO_SOCKET_IFNAME": ("lo", "all ranks are on this machine; nothing listens on other interfaces"),
    "TORCH_DEVICE_BACKEND_AUTOLOAD": ("0", "no installed device plugin is loaded"),
    "RAY_DEDUP_LOGS": ("0", "every rank's log lines are kept"),
    "HF_HUB_OFFLINE": ("1", "model and tokenizer are local folders"),
}
_CPU_VARIABLES = {  # of platform cpu
    **_CPU_HOST_VARIABLES,
    "VLLM_USE_V1": ("0", "vLLM 0.9.1 supports MLA on a CPU with engine V0 only"),
    "VLLM_CPU_KVCACHE_SPACE": ("1", "GiB of KV cache for each rank; unset means 4"),
    "TORCHDYNAMO_DISABLE": ("1", "compiling costs more than a tiny model's step"),
}


def _socket_variables(run: RunSpec) -> dict[str, tuple[str, ...]]:
    """Return the variables that each worker sets from its own node's network, where there are several nodes."""
    name, why = run.recipe.hccl.interface, "recipe.hccl.interface; a value set on the node takes precedence"
    return {
        key: (form.format(name) if name else "(towards Ray's head)", why, "node")
        for key, form in INTERFACE_VARIABLES.items()
    }


def _npu_variables(run: RunSpec) -> dict[str, tuple[str, ...]]:
    recipe = run.recipe
    ports = hccl.node_ports(run).get(hccl.HOST_PORTS)
    top_k = "recipe.rollout.ascend.top_k_optimize: top-k and top-p by a threshold, without a scatter"
    route = "1" if recipe.rollout.balanced_routing else "0"
    timeout = "a minute less than recipe.train.distributed_timeout_minutes: HCCL reports before torch's watchdog (s)"
    need = f"the exchange of experts in decode needs {hccl.buffer_need_mib(run)} (MiB)"
    base_port = "recipe.hccl.base_port; HCCL's default 60000 is in Linux's ephemeral range"
    queue = (
        "workspaces are prepared off the main thread too; torch_npu refuses it only while it captures an NPUGraph "
        "(c10_npu::NPUGraph::capture_begin), and graphs here are torchair's"
    )
    by_vllm = "memory.sleep_mode" not in run.rows
    segments = (
        "vLLM's sleep mode needs memory pools, which expandable segments break; vllm-ascend checks the CUDA name only"
        if by_vllm
        else "less fragmentation, and memory that sleep frees returns to the device; vLLM's sleep mode is off"
    )
    return {
        "VLLM_USE_V1": ("1", "graph mode and the Ascend scheduler are for engine V1 only"),
        "VLLM_ENABLE_FIX_ROUTE": (route, "recipe.rollout.balanced_routing; must be 0 or 1: unset is a TypeError"),
        "VLLM_ASCEND_MLA_PA": (
            "1" if recipe.rollout.ascend.mla_pa else "0",
            "recipe.rollout.ascend.mla_pa; 0, as in the published runs, copies a layer's whole cache at every step",
        ),
        "HCCL_CONNECT_TIMEOUT": ("1200", "ranks on many nodes start more than the default 120 s apart (s)"),
        "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE": ("1" if recipe.rollout.ascend.top_k_optimize else "0", top_k),
        "HCCL_EXEC_TIMEOUT": (str(hccl.exec_timeout_s(run)), timeout),
        "HCCL_OP_EXPANSION_MODE": (recipe.hccl.expansion_mode, "recipe.hccl.expansion_mode"),
        "HCCL_BUFFSIZE": (str(hccl.buffer_mib(run)), need),
        hccl.IF_BASE_PORT: (str(recipe.hccl.base_port), base_port),
        **({hccl.HOST_PORTS: ("{}-{}".format(*ports), "used instead of HCCL_IF_BASE_PORT's")} if ports else {}),
        **_socket_variables(run),
        "ASCEND_GLOBAL_EVENT_ENABLE": ("0", "plog has errors alone; with 1, the default, events too"),
        "TASK_QUEUE_ENABLE": ("2", queue),
        "CPU_AFFINITY_CONF": ("0", "it counts the dies that a process sees, and each of Ray's workers sees one"),
        "PYTORCH_NPU_ALLOC_CONF": (f"expandable_segments:{not by_vllm}", segments),
    }


def _driver_variables(run: RunSpec, temp_dir: str | None) -> dict[str, tuple[str, ...]]:
    """Return the variables of the driver on this machine, which other nodes must not get."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys([str(REPOSITORY), *map(str, run.trees.folders), *filter(None, given)]))
    temp, recipe = temp_dir or "(made at start)", run.recipe
    variables = {
        "PYTHONPATH": (path, "this checkout, then the upstream trees of --upstream"),
        "PYTHONUNBUFFERED": ("1", "log lines are written at once"),
        "TMPDIR": (temp, "scratch files in one folder that is removed after the run"),
    }
    if recipe.ray_address is not None:
        joined = os.environ.get("RAY_ADDRESS", "") if recipe.ray_address == "auto" else ""
        variables["RAY_ADDRESS"] = (joined or recipe.ray_address, "recipe.ray_address, or where it is auto the shell's")
    else:
        variables["RAY_TMPDIR"] = (f"{temp}/{RAY_FOLDER}", "a path short enough for sockets (107 bytes)")
    if not os.environ.get("XDG_CACHE_HOME") and not can_write_below("~/.cache"):
        variables["XDG_CACHE_HOME"] = (f"{temp}/cache", "caches of datasets and torch; the home folder is not writable")
    if recipe.platform == "npu" and (libraries := ld_preload(os.environ)):
        variables["LD_PRELOAD"] = (libraries, "jemalloc, which gives host memory back to the system")
    return {name: (*entry, "driver") for name, entry in variables.items()}


def worker_environment(run: RunSpec) -> dict[str, str]:
    """Return {name: value} of the variables that Ray's runtime_env ships to every worker."""
    return {v.name: v.value for v in environment_variables(run) if v.where == "workers"}


def process_environment(variables: list[Variable], base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` (the caller's environment) without `DROPPED_VARIABLES` and with the run's variables.

    The interpreter's folder comes first on PATH, because Ray looks for its tools there.
    """
    merged = {name: value for name, value in base.items() if name not in DROPPED_VARIABLES}
    merged.update({v.name: v.value for v in variables if v.where != "node"})
    merged["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), merged.get("PATH", os.defpath)])
    return merged
