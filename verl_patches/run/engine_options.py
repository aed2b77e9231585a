"""Write vllm-ascend's options (recipe.rollout.ascend) where vLLM's engine of the pin reads them.

No other file writes them. The same option in engine_kwargs is refused, as one of the two would be lost.
"""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.patching.spec import LEVELS
from verl_patches.platform import as_npu
from verl_patches.rollout.ascend import PREFIX_CACHING

ASCEND_KEY, ROLLOUT_KEY = "recipe.rollout.ascend", "actor_rollout_ref.rollout"
OPTIONS_KEY = f"{ROLLOUT_KEY}.engine_kwargs.vllm.additional_config"
_GRAPHS, _SCHEDULER = "torchair_graph_config", "ascend_scheduler_config"
# {key of recipe.rollout.ascend: its place in additional_config}; top_k_optimize is a variable (run/environment.py)
OPTION_PATHS = {
    "graphs": f"{_GRAPHS}.enabled",
    "graph_batch_sizes": f"{_GRAPHS}.graph_batch_sizes",
    "multistream_mla": f"{_GRAPHS}.enable_multistream_mla",
    "multistream_moe": f"{_GRAPHS}.enable_multistream_moe",
    "view_optimize": f"{_GRAPHS}.enable_view_optimize",
    "kv_nz": f"{_GRAPHS}.enable_kv_nz",
    "scheduler": f"{_SCHEDULER}.enabled",
    "chunked_prefill_for_mla": "chunked_prefill_for_mla",
    "prefix_caching": PREFIX_CACHING,
}
_ABSENT = object()  # a key whose value is null is present
# keys of ROLLOUT_KEY that recipe.rollout.ascend.graphs decides
_GRAPH_DECIDED_KEYS = ("enforce_eager", "free_cache_engine")


def check_engine_options(config: DictConfig, overrides: Collection[str], given: DictConfig) -> None:
    """Refuse keys in `overrides`, and options in engine_kwargs of `given` (still as given), that ASCEND_KEY decides."""
    if not as_npu(config.recipe.platform):
        return
    for name in _GRAPH_DECIDED_KEYS:
        if f"{ROLLOUT_KEY}.{name}" in overrides:
            raise ConfigError(
                f"{ROLLOUT_KEY}.{name}: expected no override on platform {config.recipe.platform}, where "
                f"{ASCEND_KEY}.graphs decides it: remove this override and set that key"
            )
    options = OmegaConf.select(given, OPTIONS_KEY) or OmegaConf.create()
    duplicates = []
    for key, place in OPTION_PATHS.items():
        if OmegaConf.select(options, place, default=_ABSENT) is not _ABSENT:
            duplicates.append(f"{place} (set {ASCEND_KEY}.{key} instead)")
    if duplicates:
        raise ConfigError(f"{OPTIONS_KEY}: expected no option that {ASCEND_KEY} sets, found {', '.join(duplicates)}")


def rewrite_engine_options(config: DictConfig) -> None:
    """Write recipe.rollout.ascend into a composed `config`, also again after one of its values has changed."""
    if not as_npu(config.recipe.platform):
        return
    values, rollout = OmegaConf.to_container(config.recipe.rollout.ascend), config.actor_rollout_ref.rollout
    seats = OmegaConf.select(rollout, "engine_kwargs.vllm.max_num_seqs") or 0
    values["scheduler"] = values["scheduler"] == "ascend"
    if values["graph_batch_sizes"] is None:
        # at level tuned also 8, 16, 32, ... below the seats, unless no response ends early and batches never shrink
        several = config.recipe.level == LEVELS[-1] and not rollout.ignore_eos
        smaller = [8 << n for n in range(seats.bit_length()) if several and 8 << n < seats]
        values["graph_batch_sizes"] = [*smaller, seats] if seats and values["graphs"] else []
    for key, place in OPTION_PATHS.items():
        OmegaConf.update(config, f"{OPTIONS_KEY}.{place}", values[key], merge=False, force_add=True)
    # verl refuses to free the cache engine in graph mode:
    # verl.workers.rollout.vllm_rollout.vllm_rollout_spmd.vLLMRollout.__init__
    for name in _GRAPH_DECIDED_KEYS:
        rollout[name] = not values["graphs"]
