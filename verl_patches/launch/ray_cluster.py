"""What a running Ray cluster really offers, asked before a run joins it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from verl_patches.errors import ConfigError

DEVICE_RESOURCES = {"npu": "NPU", "cuda": "GPU"}
ASK_S = 60
_ASK = """
import json, sys, ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
alive = [node for node in ray.nodes() if node["Alive"]]
print("FACTS" + json.dumps([{"address": node["NodeManagerAddress"], "resources": node["Resources"]} for node in alive]))
"""


def ask_ray(address: str, python: Sequence[str] = (sys.executable,)) -> list[dict[str, Any]]:
    """[{address, resources}] of the living nodes of the Ray at `address`; ConfigError if none answers.

    Asked by a process of its own, so that the launcher never joins the cluster itself.
    """
    try:
        done = subprocess.run([*python, "-c", _ASK, address], capture_output=True, text=True, timeout=ASK_S)
        output, error = done.stdout, done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        output, error = "", [f"no answer within {ASK_S} s"]
    line = next((line for line in output.splitlines() if line.startswith("FACTS")), None)
    if line is None:
        raise ConfigError(
            f"recipe.ray_address is {address}, but no Ray answers there ({error[-1] if error else 'no message'}). "
            "Start it on every node first: --dry-run prints the ray commands"
        )
    return json.loads(line.removeprefix("FACTS"))


def check_nodes(config: DictConfig, nodes: Sequence[dict[str, Any]]) -> None:
    """ConfigError unless `nodes` hold trainer.nnodes nodes with trainer.n_gpus_per_node devices each."""
    resource, wanted = DEVICE_RESOURCES.get(config.trainer.device, "GPU"), config.trainer.n_gpus_per_node
    held = {node["address"]: int(node["resources"].get(resource, 0)) for node in nodes}
    enough = [address for address, count in held.items() if count >= wanted]
    if len(enough) < config.trainer.nnodes:
        found = ", ".join(f"{address}: {count}" for address, count in sorted(held.items())[:20]) or "no node"
        raise ConfigError(
            f"the run needs {config.trainer.nnodes} node(s) with {wanted} {resource} each "
            f"(trainer.nnodes, trainer.n_gpus_per_node); Ray has {len(enough)} such node(s) of {len(held)} ({found}). "
            "Start the missing ones (--dry-run prints the ray commands) or correct the config"
        )
