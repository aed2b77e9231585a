"""For each failed check of a plan, one change of the configuration with which it holds, found by trying. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.config.checks import Check, check_config
from verl_patches.config.compose import model_shape_of, shape_file, vllm_arguments
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import read_json_object
from verl_patches.layout.parallel import world_size
from verl_patches.planning.plan import engine_checks
from verl_patches.planning.search import (
    ACTOR,
    MINI_BATCH,
    ROLLOUT,
    as_overrides,
    balanced_layers,
    changed,
    expert_splits,
    rollout_keys,
    seats_keys,
    train_keys,
    train_sizes,
)

_TRIED = 40  # changes for one check
_TRAIN = {"train layout", "layers", "train experts", "attention heads", "experts under tp", "recipe.train.expert_split"}
_ROLLOUT = {"rollout layout", "rollout experts", "rollout heads", "expert parallel"}
_BATCH = {"prompts", "responses", "mini batch", "mini batch share"}
_MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
_REF, _LOG_PROB_MICRO = "actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu"


def remedies(config: DictConfig, checks: Sequence[Check]) -> list[dict[str, Any]]:
    """[{check, overrides}] of the failed checks for which a change was found that mends it and breaks nothing else.

    A check without an entry names what to change in its own text.
    """
    failed = {check.name for check in checks if not check.ok}
    found = []
    for name in dict.fromkeys(check.name for check in checks if not check.ok):
        best = None  # after which the fewest checks fail
        for updates in itertools.islice(_candidates(config, name), _TRIED):
            left = _failing(changed(config, updates), name)
            if name not in left and left <= failed and (best is None or len(left) < len(best[0])):
                best = left, {"check": name, "overrides": as_overrides(updates)}
                if not left:
                    break
        found += [best[1]] if best else []
    return found


def _failing(config: DictConfig, wanted: str) -> set[str]:
    """Names of the checks that fail, without memory, whose check names its own remedies (memory_advice.py)."""
    try:
        return {check.name for check in [*check_config(config), *engine_checks(config)] if not check.ok}
    except ConfigError:
        return {wanted}


def _candidates(config: DictConfig, name: str) -> Iterator[dict[str, Any]]:
    """Changes that may mend the check `name`, nearest first; each differs from the configuration."""
    if name in _TRAIN:
        yield from _train_layouts(config)
    elif name in _ROLLOUT:
        yield from _rollout_layouts(config)
    elif name in _BATCH:
        yield from _batches(config)
        yield from _train_layouts(config)
    else:
        yield from _single_keys(config).get(name, ())


def _distance(sizes: Sequence[int], now: Sequence[int]) -> float:
    return sum(abs(math.log2(size / max(1, given))) for size, given in zip(sizes, now, strict=True))


def _train_layouts(config: DictConfig) -> Iterator[dict[str, Any]]:
    """Training layouts by how far their sizes are from the given ones; layers first alone."""
    model, actor = model_shape_of(config), config.actor_rollout_ref.actor.megatron
    now = tuple(actor[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "expert_model"))
    if now[1] <= model.num_hidden_layers:
        yield {"recipe.train.layers_per_stage": balanced_layers(model, now[1])}
    etp = {f"{ACTOR}.expert_tensor_parallel_size": 1} if config.recipe.train.expert_split == "tp_extend_ep" else {}
    given = list(config.recipe.train.layers_per_stage or ())
    for tp, pp, ep in sorted(train_sizes(model, world_size(config)), key=lambda sizes: _distance(sizes, now)):
        fits = len(given) == pp and sum(given) == model.num_hidden_layers
        yield _only_new(config, {**train_keys(tp, pp, ep, given if fits else balanced_layers(model, pp)), **etp})


def _rollout_layouts(config: DictConfig) -> Iterator[dict[str, Any]]:
    """Rollout layouts by how far TP and the ranks of an instance are from the given ones."""
    model, world = model_shape_of(config), world_size(config)
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    now = tp, tp * config.recipe.rollout.dp
    sizes = [
        (tp, ranks)
        for ranks in expert_splits(model, world)
        for tp in (1, 2, 4, 8, 16)
        if ranks > 1 and ranks % tp == 0 and model.num_attention_heads % tp == 0
    ]
    for one in sorted(sizes, key=lambda size: _distance(size, now)):
        yield _only_new(config, rollout_keys(*one))


def _batches(config: DictConfig) -> Iterator[dict[str, Any]]:
    """Mini batches of the given batch, then batches that are multiples of the ranks, nearest first."""
    given, world = config.data.train_batch_size, world_size(config)
    yield {MINI_BATCH: given}
    multiples = sorted(range(world, 4 * max(given, world) + 1, world), key=lambda size: abs(size - given))
    yield from ({"data.train_batch_size": size, MINI_BATCH: size} for size in multiples[:8])


def _single_keys(config: DictConfig) -> dict[str, list[dict[str, Any]]]:
    """{check: changes} where one key decides."""
    data, rollout, actor = config.data, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    reach = _reach(config)
    total = data.max_prompt_length + data.max_response_length
    seats = vllm_arguments(config).get("max_num_seqs") or 256
    halves = [max(1, seats >> n) for n in range(1, 6)]
    micro = actor.ppo_micro_batch_size_per_gpu or 1
    return {
        "micro batch": [{_MICRO: size} for size in range(min(micro, 16), 0, -1)],
        "max_num_seqs": [seats_keys(config, size) for size in halves],
        "graph batch sizes": [{"recipe.rollout.ascend.graph_batch_sizes": None}],
        "lengths": [
            {f"{ROLLOUT}.max_model_len": None},
            {"data.max_response_length": max(1, reach - data.max_prompt_length)},
            {"data.max_prompt_length": max(1, reach - data.max_response_length)},
        ],
        "rollout micro batch": _halves(f"{ROLLOUT}.{_LOG_PROB_MICRO}", rollout[_LOG_PROB_MICRO]),
        "ref micro batch": _halves(f"{_REF}.{_LOG_PROB_MICRO}", config.actor_rollout_ref.ref[_LOG_PROB_MICRO]),
        "routing replay": [{"recipe.train.routing_replay": None}],
        "on policy": [*_batches(config), {"recipe.train.skip_old_log_prob": False}],
        "chunked prefill": [{f"{ROLLOUT}.enable_chunked_prefill": False}],
        "prefill": [{f"{ROLLOUT}.max_num_batched_tokens": total}],
        "graph mode": [{f"{ROLLOUT}.free_cache_engine": bool(rollout.enforce_eager)}],
        "engine arguments": [{f"{ACTOR}.sequence_parallel": True}],
        "truth check": [{"recipe.logprob_check.sequences": None}],
        "HCCL buffer": [{"recipe.hccl.buffer_mib": None}, *(seats_keys(config, size) for size in halves)],
        "HCCL timeouts": [{"recipe.train.collective_timeout_minutes": 18}],
        "HCCL ports": [{"recipe.hccl.base_port": port} for port in (61000, 20000, 24000, 28000, 5000)],
        "weight sync": [{"recipe.reshard.bucket_bytes": 512 << 20}, *_train_layouts(config)],
    }


def _halves(key: str, size: int | None) -> list[dict[str, Any]]:
    """Smaller values of a micro batch, down to 1, each half of the one before."""
    return [{key: size >> n} for n in range(1, (size or 1).bit_length())]


def _reach(config: DictConfig) -> int:
    """Most tokens of a sequence, by the model's config.json."""
    return read_json_object(shape_file(config)).get("max_position_embeddings") or 0


def _only_new(config: DictConfig, updates: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that have the value already."""
    return {key: value for key, value in updates.items() if OmegaConf.select(config, key) != value}
