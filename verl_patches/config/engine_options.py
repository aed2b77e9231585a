"""vllm-ascend's options of a run: recipe.rollout.ascend, written where vLLM's engine of the pin reads them.

This is the only place that writes them. The same option in engine_kwargs is refused, as one of the two would be lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.platform import as_npu
from verl_patches.rollout.ascend import PREFIX_CACHING, VLLM_SLEEP_MODE

ASCEND, ROLLOUT = "recipe.rollout.ascend", "actor_rollout_ref.rollout"
OPTIONS = f"{ROLLOUT}.engine_kwargs.vllm.additional_config"
_GRAPHS, _SCHEDULER = "torchair_graph_config", "ascend_scheduler_config"
# key of recipe.rollout.ascend: its place in additional_config. top_k_optimize is a variable (config/environment.py)
PLACES = {
    "graphs": f"{_GRAPHS}.enabled",
    "graph_batch_sizes": f"{_GRAPHS}.graph_batch_sizes",
    "multistream_mla": f"{_GRAPHS}.enable_multistream_mla",
    "multistream_moe": f"{_GRAPHS}.enable_multistream_moe",
    "view_optimize": f"{_GRAPHS}.enable_view_optimize",
    "kv_nz": f"{_GRAPHS}.enable_kv_nz",
    "scheduler": f"{_SCHEDULER}.enabled",
    "chunked_prefill_for_mla": "chunked_prefill_for_mla",
    "prefix_caching": PREFIX_CACHING,
    "vllm_sleep_mode": VLLM_SLEEP_MODE,
}
_BY_GRAPHS = ("enforce_eager", "free_cache_engine")  # of ROLLOUT


def write_engine_options(config: DictConfig, overrides: Collection[str]) -> None:
    """Write recipe.rollout.ascend into `config`; nothing on other platforms than npu.

    overrides: keys that the command line sets. ConfigError where one of them, or engine_kwargs, sets what
    recipe.rollout.ascend decides.
    """
    if not as_npu(config.recipe.platform):
        return
    for name in _BY_GRAPHS:
        if f"{ROLLOUT}.{name}" in overrides:
            raise ConfigError(
                f"{ROLLOUT}.{name} is given on platform {config.recipe.platform}, expected only {ASCEND}.graphs, "
                "which decides it: remove the override"
            )
    rollout = config.actor_rollout_ref.rollout
    engine = OmegaConf.to_container(rollout.engine_kwargs).get("vllm") or {}
    given = engine.get("additional_config") or {}
    values = _values(config, engine.get("max_num_seqs"))
    twice = [f"{place} (set {ASCEND}.{key})" for key, place in PLACES.items() if _holds(given, place)]
    if twice:
        raise ConfigError(f"{OPTIONS} holds {', '.join(twice)}; expected these keys of {ASCEND} only")
    written = OmegaConf.create(given)
    for key, value in values.items():
        OmegaConf.update(written, PLACES[key], value)
    OmegaConf.update(config, OPTIONS, written, force_add=True)
    for name in _BY_GRAPHS:  # verl refuses to free the cache engine in graph mode (vllm_rollout_spmd.py:89)
        rollout[name] = not config.recipe.rollout.ascend.graphs


def rewrite_engine_options(config: DictConfig) -> None:
    """Write recipe.rollout.ascend into a composed `config` again, after one of its values has changed."""
    written = OmegaConf.select(config, OPTIONS)
    if written is None:
        return
    for place in PLACES.values():
        section, _, name = place.rpartition(".")
        (written[section] if section else written).pop(name, None)
    write_engine_options(config, ())


def _values(config: DictConfig, seats: int | None) -> dict[str, Any]:
    """{key: value}, in the words of vllm-ascend; without graph sizes where nothing gives them."""
    values = dict(OmegaConf.to_container(config.recipe.rollout.ascend))
    values["scheduler"] = values["scheduler"] == "ascend"
    if values["graph_batch_sizes"] is None:
        values["graph_batch_sizes"] = [seats] if seats and values["graphs"] else []
    return {key: values[key] for key in PLACES}


def _holds(options: Mapping[str, Any], place: str) -> bool:
    section, _, name = place.rpartition(".")
    return name in ((options.get(section) or {}) if section else options)
